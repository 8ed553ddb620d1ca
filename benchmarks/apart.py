"""Runs one case of a benchmark in its own process, which contains crashes, hangs and leaked memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def run_apart(command: list[str], *, limit_seconds: float) -> tuple[str, str | None]:
    """Run `command` with the repository importable; returns its output and one line on why it failed, or None."""
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
