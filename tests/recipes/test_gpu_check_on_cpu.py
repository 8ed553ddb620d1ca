"""`benchmarks/gpu_check.py --cpu`: its stages run on a CPU, and a second start does not repeat finished ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def check(repository: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_check.py", "--cpu", "--out", str(out), *words]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


# All stages that take seconds: a stage that is never run would break unnoticed.
SHORT = (
    "kernels", "numerics", "methods", "speed", "planner", "out_of_memory", "resume", "precisions", "merge",
    "recipes", "launches", "cards",
)  # fmt: skip


def test_short_stages_on_a_cpu(repository: Path, tmp_path: Path) -> None:
    done = check(repository, tmp_path, "--stages", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu_check.md").read_text()
    assert "FAILED" not in page
    assert "| qlora, full | losses differ by 0.0e+00; allocated" in page
    assert "| lora, offload | needs a GPU" in page
    assert "taken again" in page
    again = check(repository, tmp_path, "--stages", *SHORT)
    assert again.returncode == 0
    assert "──" not in again.stdout  # nothing was run again
    assert (tmp_path / "gpu_check.md").read_text() == page


@pytest.mark.soak
def test_all_of_it_on_a_cpu(repository: Path, tmp_path: Path) -> None:
    done = check(repository, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu_check.md").read_text()
    assert "FAILED" not in page
    assert "not finished" not in page
    for found in (
        r"12 steps and all weights the same, bit for bit",
        r"rank 1 has not reached all_reduce",
        "taken again",
    ):
        assert found in page
