"""`--reduce_dtype` and `--loss_scale`: in which numbers gradients really travel, and where loss scaling begins."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from launched_recipe import STEPS, launched, logged, recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def dtypes_reduced(folder: Path, operation: str) -> set[str]:
    """Of the gradients, tensors of more than a thousand elements, that rank 0 sent in the recorded step."""
    kinds: set[str] = set()
    for event in recorded(folder, operation):
        inputs = zip(event["args"]["Input type"], event["args"]["Input Dims"], strict=True)
        kinds |= {kind for kind, size in inputs if kind and math.prod(size) > 1000}
    return kinds


@pytest.mark.parametrize(
    ("dtype", "sent"), [pytest.param("fp32", "float", marks=pytest.mark.soak), ("bf16", "c10::BFloat16")]
)
def test_fsdp2_reduces_in_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str, sent: str) -> None:
    recipe = "pretrain" if dtype == "fp32" else "sft"
    folder = launched("fsdp2", "bf16", recipe, tmp_path, "--reduce_dtype", dtype)
    assert dtypes_reduced(folder, "c10d::_reduce_scatter_base_") == {sent}


def test_deepspeed_reduces_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    folder = launched("zero2", "bf16", "sft", tmp_path, "--reduce_dtype", "fp32")
    summary = json.loads((folder / "run_summary.json").read_text())
    assert summary["settings"]["reduce_dtype"] == "fp32"
    assert dtypes_reduced(folder, "gloo:all_reduce") == {"float"}


def test_ddp_reduces_in_bf16_by_its_hook_and_loss_scaling_starts_where_it_was_told(tmp_path: Path) -> None:
    flags = ["--reduce_dtype", "bf16", "--loss_scale", "1024"]
    folder = launched("ddp", "fp16", "pretrain", tmp_path, *flags)
    ddp = json.loads((folder / "run_summary.json").read_text())["ddp"]
    assert ddp["sent_bytes_per_step"] == ddp["gradient_bytes"] / 2
    assert [entry["loss_scale"] for entry in logged(folder)] == [1024.0] * STEPS
