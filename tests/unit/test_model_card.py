"""The model card of a run: the figures and names in it, and what is kept out of it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from accel_scale.launching.run_folder import OutputFolder
from accel_scale.reporting.model_card import escape, model_card, public_text, write_card
from accel_scale.reporting.summary import write_summary

RUN = {
    "recipe": "sft.py",
    "optimizer": "AdamW",
    "steps": 184,
    "losses": [3.1427, 0.0074],
    "eval_loss": 0.25,
    "tokens": 363_104.0,
    "seconds": 35.8,
    "tokens_per_second": 12_437.6,
    "data_wait_ratio": 0.015,
    "exact_match": {"before": {"accuracy": 0.07}, "after": {"accuracy": 0.98, "num_questions": 200}},
    "peak_host_bytes": 2_013_876_224,
    "peak_device_bytes": None,
    "parameters": {"total": 2_754_816, "trainable": 65_536},
    "data": {"sources": ["/home/ann/secret place/chats.jsonl", "tatsu-lab/alpaca"], "rows": 6240},
    "verified": None,
    "strategy": "ddp",
    "world_size": 2,
    "attention": "sdpa",
    "settings": {
        "model_name_or_path": "Qwen/Qwen3-0.6B",
        "output_dir": "/home/ann/outputs/run",
        "dataset_mixture": ["/home/ann/chats.jsonl=0.7", "tatsu-lab/alpaca=0.3"],
        "method": "lora",
        "learning_rate": 1e-4,
        "precision": "bf16",
        "hub_token": "hf_abcdefghijklmnop",
        "chat_template_path": "~/templates/mine.jinja",
        "logging_dir": None,
    },
    "origins": {},
}


def written(folder: Path, run: dict[str, object]) -> str:
    OutputFolder(folder, "sft.py").mark()
    card = write_card(write_summary(folder, run))
    assert card == folder / "README.md"
    return card.read_text(encoding="utf-8")


def test_it_says_what_was_run_on_what_with_which_figures(tmp_path):
    text = written(tmp_path / "my_run", RUN)
    assert "# my\\_run" in text
    for figure in ("3.1427 → 0.0074 in 184 steps", "0.2500", "7.0% → 98.0% of 200 held-out questions", "363,104",
                   "12,438 tokens/s", "35.8 s", "65,536 of 2.75M parameters", "6,240 rows", "ddp, 2 processes",
                   "torch 2", "learning rate"):  # fmt: skip
        assert figure in text, figure
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["accel-scale", "sft", "lora"],
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["tatsu-lab/alpaca"],
    }
    assert 'AutoPeftModelForCausalLM.from_pretrained("my_run")' in text
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("\n```")[0])
    assert settings["dataset_mixture"] == ["chats.jsonl=0.7", "tatsu-lab/alpaca=0.3"]
    assert settings["learning_rate"] == 1e-4


def test_neither_secrets_nor_places_of_the_machine_are_in_it(tmp_path):
    text = written(tmp_path / "run", RUN)
    for hidden in ("hf_", "/home", "ann", "~/", "secret place/", str(tmp_path)):
        assert hidden not in text, hidden
    assert "chats.jsonl" in text
    assert "mine.jinja" in text


def test_names_cannot_write_markdown_or_html():
    settings = {**RUN["settings"], "hub_model_id": 'x/<img src=x>\n# evil | `a` [b](c)"', "note": "``` \n````\n# evil"}
    text = model_card({**RUN, "settings": settings}, name="run")
    assert "<img" not in text.replace(json.dumps(settings["hub_model_id"]), "")
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert title.startswith("# &lt;img src=x&gt; \\# evil \\|")
    fences = [line for line in text.splitlines() if line.startswith("`````")]
    assert len(fences) == 2  # fences are longer than any run of backticks in the settings
    assert escape("a*b_c|d\ne<f>&") == "a\\*b\\_c\\|d e&lt;f&gt;&amp;"


def test_paths_are_cut_and_other_slashes_stay():
    kept = (
        "Qwen/Qwen3-0.6B",
        "https://a.b/c/d",
        "data/rows.jsonl",
        "3 s / step",
        "a and/or b",
        "openai/gsm8k:main=0.3",
    )
    for text in kept:
        assert public_text(text).replace(" ", "") == text.replace(" ", "") or "/ step" in text, text
    assert public_text("/a/b/c.jsonl=0.7") == "c.jsonl=0.7"
    assert public_text("see C:\\Users\\ann\\x.txt, ~/y/z") == "see x.txt, z"
    assert public_text("/x/accel_scale/assets/default/model") == "accel-scale's embedded model"


def test_a_readme_of_the_users_stays(tmp_path):
    folder = tmp_path / "run"
    written(folder, RUN)
    readme = folder / "README.md"
    first = readme.read_text()
    summary = write_summary(folder, {**RUN, "steps": 185})
    assert write_card(summary) == readme
    assert readme.read_text() != first
    readme.write_text("mine")
    assert write_card(summary) is None
    assert readme.read_text() == "mine"


def test_a_whole_model_from_nothing_is_no_adapter():
    settings = {"model_config": "/x/tiny/config.json", "data": ["books=0.5", "a/b:c=0.5"]}
    text = model_card({**RUN, "recipe": "pretrain.py", "settings": settings, "data": {}}, name="run")
    assert "AutoModelForCausalLM, AutoTokenizer" in text
    assert "pretrained by `pretrain.py`" in text
    assert yaml.safe_load(text.split("---\n")[1])["datasets"] == ["a/b"]
