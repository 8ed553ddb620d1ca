"""`benchmarks/gpu_sft.py`: what it measures first, and on how many GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_sft


def test_the_largest_models_methods_come_first() -> None:
    found = gpu_sft.cases(["0.5B", "1.5B", "8B"], on_gpu=True)
    assert [(case.size, case.method) for case in found[:4]] == [
        ("8B", "qlora"), ("8B", "lora"), ("8B", "full"), ("1.5B", "qlora"),
    ]  # fmt: skip
    assert len({(case.size, case.method) for case in found[:9]}) == 9
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("visible", "used"), [(None, "0"), ("2,3", "2"), ("GPU-1b2c,GPU-3d4e", "GPU-1b2c")])
def test_a_host_with_eight_gpus_lends_one(monkeypatch, visible: str | None, used: str) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu_sft.use_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == used
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")


def test_the_peak_is_the_catalogues() -> None:
    assert gpu_sft.utilisation(8 * 10**9, 10_000.0, "NVIDIA H100 80GB HBM3") == pytest.approx(0.485, abs=0.005)
    assert gpu_sft.utilisation(8 * 10**9, 10_000.0, "cpu") is None
