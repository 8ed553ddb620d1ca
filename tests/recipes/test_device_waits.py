"""In a micro-batch of either recipe the host never waits for the GPU; a step waits only for its guard's inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_no_micro_batch_waits(repository: Path, tmp_path: Path) -> None:
    # In a separate process: libraries remember what they have asked about the device.
    script = repository / "benchmarks" / "device_waits.py"
    done = subprocess.run(
        [sys.executable, str(script), "--results", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "device_waits.json").read_text())["now"]
    assert len(found) == 8
    for where, entry in found.items():
        # Per step: the gradient norm, and the verdict of all ranks.
        allowed = 2 if "each step, readbacks" in where else 0
        assert entry["count"] <= allowed, (where, entry)
