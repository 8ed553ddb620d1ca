"""recipes/kto.py trains like TRL's own script, also with adapters, and settings its KL term rules out are refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trl.scripts
from launched_recipe import launched, logged
from pairs import write_labelled

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.trl import KTO

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 8


def losses(script: Path, folder: Path, *flags: str) -> list[float]:
    words = [
        *("--model_name_or_path", default_model_path(), "--dataset_name", str(folder.parent / "rows")),
        *("--max_steps", str(STEPS), "--per_device_train_batch_size", "4", "--learning_rate", "1e-4"),
        *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--seed", "7", "--max_length", "128"),
        *("--logging_steps", "1", "--save_strategy", "steps", "--save_steps", str(STEPS)),
        *("--undesirable_weight", "1.5", "--output_dir", str(folder), *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0"],
        ["--precompute_ref_log_probs", "true"],
        ["--loss_type", "apo_zero_unpaired"],
    ],
    ids=["full", "lora", "precomputed", "apo"],
)
def test_losses_are_those_of_trls_script(tmp_path: Path, flags: list[str]) -> None:
    write_labelled(tmp_path / "rows")
    ours = losses(
        REPOSITORY / "recipes/kto.py", tmp_path / "ours", "--precision", "fp32", "--fused_kernels", "off", *flags
    )
    plain = ["--dtype", "float32", "--bf16", "false", "--use_cpu", "--report_to", "none"]
    theirs = losses(Path(trl.scripts.__file__).with_name("kto.py"), tmp_path / "theirs", *plain, *flags)
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert len(set(ours)) > 2, "something is learnt"
    assert (tmp_path / "ours" / "adapter_config.json").is_file() == ("--use_peft" in flags)
    summary = json.loads((tmp_path / "ours" / "run_summary.json").read_text())
    assert (summary["recipe"], summary["steps"]) == ("kto.py", STEPS)
    assert len(summary["margins"]) == STEPS
    assert summary["margins"][0] == 0.0, "of a model that is its own reference"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--long_rows", "true"], "long_rows"),
        (["--per_device_train_batch_size", "1"], "apo_zero_unpaired"),
        (["--train_sampling_strategy", "random"], "shuffle the rows of the file"),
        (["--auto_find_batch_size", "true"], "auto_find_batch_size"),
        (["--precompute_ref_log_probs", "true", "--sync_ref_model", "true"], "sync_ref_model"),
        (["--padding_free", "true"], "padding_free"),
        (["--loss_type", "sigmoid"], "apo_zero_unpaired"),
        (["--undesirable_weight", "-1"], "use 0 or more"),
    ],
)
def test_what_is_not_done_for_labels_is_refused(flags: list[str], named: str) -> None:
    given = ["--model_name_or_path", "m", "--dataset_name", "d", *flags]
    with pytest.raises(ConfigError) as refused:
        KTO.refuse(parse_flags(KTO.flags, given, program="kto.py"))
    assert named in refused.value.one_line()


def test_a_loss_without_a_kl_term_takes_single_rows_in_any_order() -> None:
    given = ["--loss_type", "apo_zero_unpaired", "--per_device_train_batch_size", "1"]
    given += ["--train_sampling_strategy", "random"]
    KTO.refuse(parse_flags(KTO.flags, given, program="kto.py"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_loss_is_that_of_a_model_equal_to_its_reference(tmp_path: Path) -> None:
    """Half of each weight: two of three rows are good, and no reward differs from the reference's."""
    rows = str(write_labelled(tmp_path / "rows", count=30))
    given = ["--model_name_or_path", default_model_path(), "--dataset_name", rows, "--undesirable_weight", "3"]
    flags = ["--per_device_train_batch_size", "30", "--max_steps", "2"]
    (first, second) = logged(launched("cpu", "fp32", "kto", tmp_path / "out", *given, *flags, processes=1))
    assert first["loss"] == pytest.approx(0.5 * (2 / 3 + 3 / 3), abs=1e-6)
    assert (first["kl"], first["rewards/margins"]) == (0.0, 0.0)
    assert second["loss"] < first["loss"]
    assert math.isfinite(second["kl"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_have_one_kind_of_answer_each_train_in_bf16(tmp_path: Path) -> None:
    folder = write_labelled(tmp_path / "rows", count=24)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "label": n % 4 < 2}) + "\n" for n, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(lines))
    given = ["--model_name_or_path", default_model_path(), "--dataset_name", str(folder)]
    entries = logged(launched("ddp", "bf16", "kto", tmp_path / "out", *given))
    assert len(entries) == 5
    assert all({"rewards/chosen", "rewards/rejected", "rewards/margins"} <= entry.keys() for entry in entries)
    assert entries[-1]["rewards/chosen"] != entries[0]["rewards/chosen"] == 0.0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [4, pytest.param(0, marks=pytest.mark.soak)])
def test_no_flags_learn_right_answers_from_wrong_ones(steps: int, tmp_path: Path) -> None:
    """`make kto`; the soaks run it in full."""
    given = ["--max_steps", str(steps), "--exact_match_samples", "5", "--logging_steps", "1"] if steps else []
    given += ["--eval_strategy", "steps", "--eval_steps", str(steps)] if steps else []
    command = [sys.executable, str(REPOSITORY / "recipes/kto.py"), "--output_dir", str(tmp_path), *given]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run_summary.json").read_text())
    assert "good over bad" in done.stdout
    assert summary["steps"] == (steps or 200)
    if steps:
        assert summary["eval_loss"] > 0
    else:
        assert summary["margins"][-1] > 3
        assert summary["exact_match"]["before"]["accuracy"] <= 0.1
        assert summary["exact_match"]["after"]["accuracy"] >= 0.4
