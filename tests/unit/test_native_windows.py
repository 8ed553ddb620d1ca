"""On native Windows, every command that trains or launches stops with one line; the doctor reports it as an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Removes the modules and functions that Windows lacks, and reports its platform name.
WINDOWS = """
import os, platform, runpy, signal, sys
import psutil  # which takes Windows' own counters there
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for module, name in ((os, "sched_getaffinity"), (os, "killpg"), (os, "getpgid"), (signal, "SIGKILL")):
    delattr(module, name)
platform.system = lambda: "Windows"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def said(*words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", WINDOWS, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["recipes/sft.py", "--method", "lora"],
        ["recipes/pretrain.py"],
        ["accel_scale/cli/main.py", "sft", "--launch", "ddp"],
        ["accel_scale/cli/main.py", "rehearse", "--config_file", "accelerate_configs/fsdp2.yaml", "recipes/sft.py"],
        ["accel_scale/cli/main.py", "scaling-test", "--config_file", "accelerate_configs/ddp.yaml", "recipes/sft.py"],
    ],
    ids=" ".join,
)
def test_one_line_says_where_to_run_it(words: list[str]) -> None:
    status, _, stderr = said(*words)
    assert status == 2
    [line] = stderr.strip().splitlines()
    assert "this machine: NCCL, DeepSpeed and the memory counters of the recipes do not exist" in line
    assert line.endswith("Fix: install WSL2 (wsl --install), and run it there.")


@pytest.mark.slow
def test_the_doctor_lists_it() -> None:
    status, stdout, _ = said("accel_scale/cli/main.py", "doctor")
    assert status == 1
    assert "error: this machine: NCCL, DeepSpeed" in stdout
