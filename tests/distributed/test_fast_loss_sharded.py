"""The lean loss weighs tokens over ranks, and its head's gradient is whole however the head is sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_gradients_over_two_ranks_equal_one_process(repository):
    script = Path(__file__).with_name("fast_loss_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    cases = {line["case"]: line for line in map(json.loads, process.stdout.strip().splitlines())}
    assert set(cases) == {"ddp", "fsdp2", "fsdp2_head_apart"}
    for name, case in cases.items():
        assert case["num_grads"] == 21, name
        assert case["largest"] > 1e-2, name
        assert case["difference"] < 1e-6, name
