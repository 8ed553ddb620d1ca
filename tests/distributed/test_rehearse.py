"""`accel-scale rehearse` on real launches: some that work, and some that do not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import Qwen3Config

from accel_scale.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = str(REPOSITORY / "recipes" / "sft.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Only the configuration of an 8-billion-parameter model that could not be loaded here."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def results(printed: str) -> dict[str, str]:
    """Map each check to its result, from the printed table."""
    return dict(re.findall(r"^│(\w+) +│ (\w+|–) +│", printed, re.MULTILINE))


def test_fsdp2_lora_passes(real_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of a real 8-GPU run: the tiny model trains, resumes to the last bit and reloads."""
    launch = ["--config_file", str(REPOSITORY / "accelerate_configs" / "fsdp2.yaml"), "--keep", str(tmp_path)]
    flags = ["--model_name_or_path", real_model, "--dataset_name", "nobody/has-this", "--method", "lora"]
    flags += ["--lora_dropout", "0.1", "--max_length", "8192", "--attn_implementation", "flash_attention_2"]
    status = main(["rehearse", *launch, RECIPE, *flags, "--output_dir", str(tmp_path / "real-output")])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert set(results(printed).values()) == {"passed"}, printed
    assert "36 → 2 layers" in printed
    assert "data: embedded rows in place of nobody/has-this" in printed
    assert "flash_attention_2 needs a GPU" in printed
    assert not (tmp_path / "real-output").exists(), "nothing is written where the real run will write"
    summary = json.loads((tmp_path / "resumed" / "run_summary.json").read_text())
    assert (summary["world_size"], summary["strategy"], summary["rehearsal"]) == (2, "fsdp2", True)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("name", "num_processes", "sharing"),
    [
        ("pp", 2, ["--pp_size", "4", "--pp_schedule", "interleaved"]),
        pytest.param("3d", 8, ["--pp_size", "2"], marks=pytest.mark.soak),
        pytest.param("fsdp2_tp", 4, [], marks=pytest.mark.soak),
        pytest.param("fsdp2_sp", 4, [], marks=pytest.mark.soak),
        pytest.param("zero3", 2, [], marks=pytest.mark.soak),
    ],
)
def test_pretraining_passes(
    name: str, num_processes: int, sharing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Llama of 1.3 billion parameters trained from scratch, on text that is on another machine."""
    launch = ["--config_file", str(REPOSITORY / "accelerate_configs" / f"{name}.yaml"), "--keep", str(tmp_path)]
    recipe = str(REPOSITORY / "recipes" / "pretrain.py")
    flags = [
        "--num_params",
        "1.3B",
        "--train_tokenizer",
        "--data",
        "nobody/has-this",
        "--global_batch_size",
        "256",
        "--max_tokens",
        "26B",
    ]
    flags += ["--warmup_steps", "2000", "--output_dir", str(tmp_path / "real-output")]
    status = main(["rehearse", *launch, recipe, *flags, *sharing])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert set(results(printed).values()) == {"passed"}, printed
    assert f"{4 if 'interleaved' in sharing else 2} layers" in printed
    assert "data: embedded rows in place of nobody/has-this" in printed
    assert not (tmp_path / "real-output").exists(), "nothing is written where the real run will write"
    summary = json.loads((tmp_path / "resumed" / "run_summary.json").read_text())
    assert (summary["recipe"], summary["world_size"]) == ("pretrain.py", num_processes)


def test_pretraining_of_adapters_passes_with_a_sample(
    real_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT generates past the hooks that gather embedding, last norm and head. Resumed dropout continues unchanged."""
    launch = ["--config_file", str(REPOSITORY / "accelerate_configs" / "fsdp2.yaml"), "--keep", str(tmp_path)]
    flags = ["--model_name_or_path", real_model, "--data", "nobody/has-this", "--method", "lora"]
    flags += ["--lora_dropout", "0.5", "--learning_rate", "1e-2"]
    status = main(["rehearse", *launch, str(REPOSITORY / "recipes" / "pretrain.py"), *flags])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert set(results(printed).values()) == {"passed"}, printed
    assert len(json.loads((tmp_path / "resumed" / "run_summary.json").read_text())["sample"]) > 20


def test_a_launch_that_fails_says_why(real_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows are longer than the model's positions, which the recipe refuses."""
    short = shutil.copytree(real_model, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    launch = ["--config_file", str(REPOSITORY / "accelerate_configs" / "ddp.yaml")]
    flags = ["--model_name_or_path", str(short), "--dataset_name", "nobody/has-this", "--method", "lora"]
    status = main(["rehearse", *launch, RECIPE, *flags])
    printed = capsys.readouterr().out
    assert status == 1
    found = results(printed)
    assert (found["shrink"], found["launch"]) == ("passed", "FAILED")
    assert {found[name] for name in ("processes", "losses", "checkpoint", "resume", "reload")} == {"–"}
    assert "64 positions" in " ".join(printed.replace("│", " ").split())
    assert "Traceback" not in printed
    assert len(printed.splitlines()) < 30


OWN_SCRIPT = """
from dataclasses import dataclass

from datasets import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Own:
    model: str


own, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
rows = [{"input_ids": list(range(n, n + 16)), "labels": list(range(n, n + 16))} for n in range(3, 35)]
model = AutoModelForCausalLM.from_pretrained(own.model)
trainer = Trainer(model, args, train_dataset=Dataset.from_list(rows))
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
"""


def test_a_third_recipe_passes(real_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DPO in sixty lines, in a folder unknown to the package, with the flags that its `RECIPE` declares."""
    script = tmp_path / "dpo.py"
    shutil.copyfile(REPOSITORY / "tests" / "recipes" / "third_recipe.py", script)
    launch = ["--config_file", str(REPOSITORY / "accelerate_configs" / "ddp.yaml"), "--keep", str(tmp_path / "kept")]
    flags = ["--model_name_or_path", real_model, "--learning_rate", "1e-2", "--max_steps", "5000"]
    status = main(["rehearse", *launch, str(script), *flags])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert set(results(printed).values()) == {"passed"}, printed
    assert "36 → 2 layers" in printed
    assert "one run of 2" in printed
    state = json.loads((tmp_path / "kept" / "uninterrupted" / "checkpoint-4" / "trainer_state.json").read_text())
    assert any("rewards/margins" in entry for entry in state["log_history"]), "TRL's trainer ran, not a stand-in"


def test_a_script_of_ones_own_is_rehearsed_as_it_is(
    real_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script imports nothing of this project; left alone, its two processes would train separately."""
    script = tmp_path / "train.py"
    script.write_text(OWN_SCRIPT)
    launch = ["--config_file", str(REPOSITORY / "accelerate_configs" / "ddp.yaml")]
    status = main(["rehearse", *launch, "--model_flag", "model", str(script), "--model", real_model])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert set(results(printed).values()) == {"passed"}, printed
    assert "36 → 2 layers" in printed
    assert "one run of 2" in printed


def test_a_script_with_other_flags_is_told_what_it_must_accept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    launch = ["--config_file", str(REPOSITORY / "accelerate_configs" / "cpu.yaml")]
    assert main(["rehearse", *launch, str(script)]) == 1
    printed = capsys.readouterr().out
    assert "unrecognized arguments" in printed
    assert "It must then accept transformers' --output_dir" in printed
    assert results(printed)["launch"] == "FAILED"
