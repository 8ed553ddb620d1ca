"""Runs a script on several CPU processes under torchrun, and returns its output or fails with its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def torchrun(
    script: str,
    num_processes: int,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> str:
    """The output of ``script``, a file in this folder, on `num_processes` processes; fails with their errors."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--standalone"]
    command = [*launch, str(Path(__file__).with_name(script)), *arguments]
    plain = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}
    environment = {**os.environ, **plain, **(env or {})}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stderr[:4000]}\n…\n{done.stderr[-1000:]}"
    return done.stdout


def cases(
    script: str, num_processes: int, *arguments: str, env: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """The JSON lines that `script` printed, by their ``case``."""
    output = torchrun(script, num_processes, *arguments, env=env)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    return {line.pop("case"): line for line in lines}
