"""Every stage of `benchmarks/gpu_check.py` on this machine's GPUs; skipped without CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from gpu_stages import STAGES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_nothing_fails(repository: Path, tmp_path: Path, stage) -> None:
    if torch.cuda.device_count() < stage.num_gpus:
        pytest.skip(f"needs {stage.num_gpus} GPUs")
    command = [sys.executable, "benchmarks/gpu_check.py", "--out", str(tmp_path), "--stages", stage.name]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
