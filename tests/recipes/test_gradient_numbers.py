"""What actually travels between ranks: the dtype of gradients, the order of weights, and the initial loss scale."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from launched_recipe import STEPS, events, launched, logged, recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def dtypes_reduced(folder: Path, operation: str) -> set[str]:
    """Dtypes of gradients (tensors of more than a thousand elements) that rank 0 sent in the recorded step."""
    kinds: set[str] = set()
    for event in recorded(folder, operation):
        inputs = zip(event["args"]["Input type"], event["args"]["Input Dims"], strict=True)
        kinds |= {kind for kind, size in inputs if kind and math.prod(size) > 1000}
    return kinds


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with two requests: gradients in bf16, and weights gathered ahead."""
    ahead = ["--fsdp_forward_prefetch", "true"]
    folder = tmp_path_factory.mktemp("fsdp2")
    return launched("fsdp2", "bf16", "sft", folder, "--reduce_dtype", "bf16", launcher_flags=ahead)


def test_fsdp2_reduces_in_the_dtype_that_was_asked_for(fsdp2: Path) -> None:
    assert dtypes_reduced(fsdp2, "c10d::_reduce_scatter_base_") == {"c10::BFloat16"}


@pytest.mark.soak
def test_fsdp2_reduces_in_fp32_too(tmp_path: Path) -> None:
    folder = launched("fsdp2", "bf16", "pretrain", tmp_path, "--reduce_dtype", "fp32")
    assert dtypes_reduced(folder, "c10d::_reduce_scatter_base_") == {"float"}


def test_fsdp2_gathers_layers_ahead_where_the_launch_file_says_so(fsdp2: Path) -> None:
    ahead = [event["name"] for event in events(fsdp2) if event["name"].startswith("FSDP::forward_prefetch")]
    layers = [int(name.rpartition(".")[2]) for name in ahead]
    assert layers == [1, 2, 3], ahead  # of four layers; the first has no layer below it


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
