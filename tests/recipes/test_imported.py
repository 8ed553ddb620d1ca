"""Imported configurations match `--print_config` and train; a pushed model has the run's model card."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from accel_scale.cli.main import main
from accel_scale.data.default import default_model_path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.bad_inputs import load_recipe

EXAMPLES = Path(__file__).parents[1] / "unit" / "imported"
EXPECTED = yaml.safe_load((EXAMPLES / "expected.yaml").read_text(encoding="utf-8"))
FACTS = [(f"What is {n} plus {n}?", f"It is {2 * n}.") for n in range(40)]
pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The examples next to the data that they name."""
    shutil.copytree(EXAMPLES, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    alpaca = [{"instruction": question, "input": "", "output": answer} for question, answer in FACTS]
    pairs = [{"question": q, "better": a, "worse": "I do not know."} for q, a in FACTS]
    Path("data/faq.json").write_text(json.dumps(alpaca))
    for name, rows in (("rows.jsonl", alpaca), ("pairs.jsonl", pairs)):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "here"


def run(module: Any, name: str, *more: str) -> dict[str, Any]:
    """Import a configuration, then train the embedded model with the result for two steps."""
    assert main(["import", name, "-o", "out.yaml"]) == 0
    words = ["--config_file", "out.yaml", "--model_name_or_path", default_model_path(), "--max_length", "128"]
    return module.main([*words, "--max_steps", "2", "--save_strategy", "no", "--precision", "fp32", *more])


def plain(value: object) -> object:
    """Numbers as floats: YAML reads ``2e-5`` as text."""
    try:
        return float(str(value))
    except ValueError:
        return value


@pytest.mark.parametrize("name", ["axolotl_full.yml", "axolotl_dpo.yml", "factory_lora.yaml"])
def test_an_imported_configuration_is_what_the_recipe_resolves(here, name, capsys, sft_module):
    recipe = EXPECTED[name]["recipe"]
    module = sft_module if recipe == "sft" else load_recipe(recipe)
    run(module, name, "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    changed = {"model_name_or_path", "max_length", "max_steps", "save_strategy", "output_dir"}
    for flag, value in EXPECTED[name]["flags"].items():
        if flag not in changed:
            assert plain(printed[flag]) == plain(value), flag


def test_an_imported_full_run_trains_and_evaluates(here, sft_module):
    summary = run(sft_module, "axolotl_full.yml", "--output_dir", "full", "--logging_steps", "1")
    assert (summary["steps"], len(summary["losses"])) == (2, 2)
    assert summary["eval_loss"] > 0
    assert summary["data"]["rows"] == 36  # of 40 rows, with a tenth held out
    assert summary["parameters"]["trainable"] == summary["parameters"]["total"]


def test_an_imported_dpo_run_trains(here):
    summary = run(load_recipe("dpo"), "axolotl_dpo.yml", "--output_dir", "dpo", "--logging_steps", "1")
    assert summary["steps"] == 2
    assert summary["losses"][0] == pytest.approx(0.6931, abs=0.01)
    assert Path("dpo/README.md").read_text().startswith("---\nlibrary_name: transformers\n")


def test_what_is_pushed_has_the_card_with_the_figures(here, sft_module, monkeypatch):
    pushed: list[dict[str, Any]] = []

    def upload(**arguments: Any) -> None:
        folder = Path(arguments["folder_path"])
        pushed.append({"card": (folder / "README.md").read_text(), "files": {path.name for path in folder.iterdir()}})

    # Replaces only the hub's client; everything before it is real.
    hub = SimpleNamespace(
        create_repo=lambda name, **_: SimpleNamespace(repo_id=name), upload_folder=lambda **kw: upload(**kw)
    )
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    words = ["--push_to_hub", "true", "--hub_model_id", "ann/faq", "--hub_token", "hf_abcdefghijklmnopq"]
    summary = run(sft_module, "factory_lora.yaml", "--output_dir", "lora", "--logging_steps", "1", *words)
    assert len(pushed) == 1
    card = pushed[0]["card"]
    assert card == Path("lora/README.md").read_text()
    assert f"{summary['losses'][0]:.4f} → {summary['losses'][-1]:.4f} in 2 steps" in card
    assert "# faq" in card
    assert 'AutoPeftModelForCausalLM.from_pretrained("ann/faq")' in card
    assert "hf_abcdefghijklmnopq" not in card
    assert str(here) not in card
    assert {"adapter_model.safetensors", "run_summary.json"} <= pushed[0]["files"]
