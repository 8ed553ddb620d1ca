"""One case of a benchmark in a process of its own: a crash, a hang or memory that is not freed stays there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def run_apart(command: list[str], *, limit_seconds: float) -> tuple[str, str | None]:
    """What `command` printed, with the repository importable, and in one line why it failed, or None."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"not finished in {limit_seconds:.0f} s"
    if not done.returncode:
        return done.stdout, None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.stdout, lines[-1][:300] if lines else f"exit status {done.returncode}"
