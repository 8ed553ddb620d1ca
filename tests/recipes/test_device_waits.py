"""In a micro-batch of either recipe the host never waits for the GPU; a step waits for what its guard decides on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_no_micro_batch_waits(repository: Path, tmp_path: Path) -> None:
    # In a process of its own: what a library has already asked about the device stays asked.
    script = repository / "benchmarks" / "device_waits.py"
    done = subprocess.run(
        [sys.executable, str(script), "--results", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "device_waits.json").read_text())["now"]
    assert len(found) == 8
    for where, entry in found.items():
        # Of a step: the gradient norm, and the verdict of all ranks.
        allowed = 2 if "each step, readbacks" in where else 0
        assert entry["count"] <= allowed, (where, entry)
