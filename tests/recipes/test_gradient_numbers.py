"""`--reduce_dtype` and `--loss_scale`: in which numbers gradients really travel, and where loss scaling begins."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHORT = "--max_steps 5 --logging_steps 1 --seed 7 --per_device_train_batch_size 2"
PRETRAIN = "--max_length 64 --save_steps 0 --eval_steps 0 --sample_tokens 0 --profile_steps 1"
SFT = "--method full --save_strategy no --exact_match_samples 0 --profile_steps 1"


def launched(repository: Path, name: str, precision: str, recipe: str, folder: Path, flags: str) -> Path:
    launcher = {"fp32": "no"}.get(precision, precision)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", launcher]
    words += ["--config_file", f"accelerate_configs/{name}.yaml", f"recipes/{recipe}.py", "--output_dir", str(folder)]
    words += ["--precision", precision, *SHORT.split(), *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


def logged(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def dtypes_reduced(folder: Path, operation: str) -> set[str]:
    """Of the gradients, tensors of more than a thousand elements, that rank 0 sent in the recorded step."""
    events = json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    kinds: set[str] = set()
    for event in events:
        if event.get("name") == operation:
            inputs = zip(event["args"]["Input type"], event["args"]["Input Dims"], strict=True)
            kinds |= {kind for kind, size in inputs if kind and math.prod(size) > 1000}
    return kinds


@pytest.mark.parametrize(
    ("dtype", "sent"), [pytest.param("fp32", "float", marks=pytest.mark.soak), ("bf16", "c10::BFloat16")]
)
def test_fsdp2_reduces_in_the_dtype_that_was_asked_for(
    repository: Path, tmp_path: Path, dtype: str, sent: str
) -> None:
    recipe, flags = ("pretrain", PRETRAIN) if dtype == "fp32" else ("sft", SFT)
    folder = launched(repository, "fsdp2", "bf16", recipe, tmp_path, f"{flags} --reduce_dtype {dtype}")
    assert dtypes_reduced(folder, "c10d::_reduce_scatter_base_") == {sent}


def test_deepspeed_reduces_in_the_dtype_that_was_asked_for(repository: Path, tmp_path: Path) -> None:
    folder = launched(repository, "zero2", "bf16", "sft", tmp_path, f"{SFT} --reduce_dtype fp32")
    summary = json.loads((folder / "run_summary.json").read_text())
    assert summary["settings"]["reduce_dtype"] == "fp32"
    assert dtypes_reduced(folder, "gloo:all_reduce") == {"float"}


def test_ddp_reduces_in_bf16_by_its_hook_and_loss_scaling_starts_where_it_was_told(
    repository: Path, tmp_path: Path
) -> None:
    flags = f"{PRETRAIN} --reduce_dtype bf16 --loss_scale 1024"
    folder = launched(repository, "ddp", "fp16", "pretrain", tmp_path, flags)
    ddp = json.loads((folder / "run_summary.json").read_text())["ddp"]
    assert ddp["sent_bytes_per_step"] == ddp["gradient_bytes"] / 2
    assert [entry["loss_scale"] for entry in logged(folder)] == [1024.0] * 5
