"""recipes/dpo.py trains like TRL's own script, also with adapters, and contradictory flags are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trl.scripts
from pairs import write_pairs

from accel_scale.data.default import default_data_paths, default_dataset, default_model_path, default_pairs
from accel_scale.data.loading import load_training_data
from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.trl import DPO

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 8


def losses(script: Path, folder: Path, *flags: str) -> list[float]:
    words = [
        *("--model_name_or_path", default_model_path(), "--dataset_name", str(folder.parent / "pairs")),
        *("--max_steps", str(STEPS), "--per_device_train_batch_size", "2", "--learning_rate", "1e-4"),
        *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--seed", "7", "--max_length", "128"),
        *("--logging_steps", "1", "--save_strategy", "steps", "--save_steps", str(STEPS)),
        *("--output_dir", str(folder), *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [[], ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"]])
def test_losses_are_those_of_trls_script(tmp_path: Path, adapters: list[str]) -> None:
    write_pairs(tmp_path / "pairs")
    dropout = ["--lora_dropout", "0"] if adapters else []
    ours = losses(
        REPOSITORY / "recipes/dpo.py",
        tmp_path / "ours",
        "--precision",
        "fp32",
        "--fused_kernels",
        "off",
        *adapters,
        *dropout,
    )
    script = Path(trl.scripts.__file__).with_name("dpo.py")
    plain = ["--dtype", "float32", "--bf16", "false", "--use_cpu", "--report_to", "none"]
    theirs = losses(script, tmp_path / "theirs", *plain, *adapters, *dropout)
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert len(set(ours)) > 2, "something is learnt"
    assert (tmp_path / "ours" / "adapter_config.json").is_file() == bool(adapters)
    summary = json.loads((tmp_path / "ours" / "run_summary.json").read_text())
    assert (summary["recipe"], summary["steps"]) == ("dpo.py", STEPS)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--padding_free", "true"], "padding_free"),
        (["--long_rows", "true"], "long_rows"),
        (["--precompute_ref_log_probs", "true", "--sync_ref_model", "true"], "sync_ref_model"),
    ],
)
def test_what_is_not_done_for_pairs_is_refused(flags: list[str], named: str) -> None:
    given = ["--model_name_or_path", "m", "--dataset_name", "d", *flags]
    with pytest.raises(ConfigError, match=r"remove|keep") as refused:
        DPO.refuse(parse_flags(DPO.flags, given, program="dpo.py"))
    assert named in str(refused.value)


def test_pairs_are_read_and_others_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "chosen": "a", "rejected": "b"}\n')
    data = load_training_data(str(rows), columns=["prompt=question"], rows_with="pairs")
    assert data.train[0] == {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ConfigError, match="no pairs of answers"):
        load_training_data(str(rows), rows_with="pairs")


def test_embedded_pairs_are_a_right_answer_and_another_rows(tmp_path: Path) -> None:
    path = Path(default_pairs(str(tmp_path / "data")))
    pairs = [json.loads(line) for line in path.read_text().splitlines()]
    lines = Path(default_data_paths()[0]).read_text().splitlines()
    right = {row["messages"][0]["content"]: row["answer"] for row in default_dataset()[0]}
    assert len(pairs) > 5900
    for pair in pairs:
        assert pair["chosen"][0]["content"] == right[pair["prompt"][0]["content"]] != pair["rejected"][0]["content"]
    assert {pair["rejected"][0]["content"] for pair in pairs} <= set(right.values())
    others = Path(default_pairs(str(tmp_path / "any"), of_any_task=True)).read_text().splitlines()
    rejected = [json.loads(line)["rejected"][0]["content"] for line in others]
    assert rejected[0] == json.loads(lines[0])["messages"][-1]["content"], "of the question before it"
    assert len(others) > 5900
    written = path.stat().st_mtime_ns
    assert Path(default_pairs(str(tmp_path / "data"))).stat().st_mtime_ns == written, "made once"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [4, pytest.param(0, marks=pytest.mark.soak)])
def test_no_flags_learn_to_prefer_and_to_answer(steps: int, tmp_path: Path) -> None:
    """`make dpo`; the soaks run it in full."""
    given = ["--max_steps", str(steps), "--exact_match_samples", "5", "--logging_steps", "1"] if steps else []
    given += ["--eval_strategy", "steps", "--eval_steps", str(steps)] if steps else []
    command = [sys.executable, str(REPOSITORY / "recipes/dpo.py"), "--output_dir", str(tmp_path), *given]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run_summary.json").read_text())
    assert summary["steps"] == (steps or 300)
    assert "% of pairs" in done.stdout
    if steps:
        assert summary["eval_loss"] > 0
    else:
        assert summary["preferred"][-1] >= 0.95
        assert summary["exact_match"]["before"]["accuracy"] <= 0.1
        assert summary["exact_match"]["after"]["accuracy"] >= 0.9
