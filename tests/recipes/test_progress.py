"""Output of the recipes while they train: a bar on a terminal, one line per log point in a file, nothing twice."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
LINE = re.compile(
    r"step +(?P<step>\d+)/(?P<total>\d+)  loss \d+\.\d{4}  lr \d\.\d\de-\d\d(  (?P<speed>[\d,]+) tokens/s"
    r"(  MFU \d+%)?)?  [\d.]+ [KMG]iB(  [\d.]+ s left)?"
)


def run_on_terminal(command: list[str], repository: Path) -> tuple[str, str]:
    """(what stdout, a pipe, received; what stderr, a terminal, showed)."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                shown.append(os.read(parent, 65536))
            except OSError:  # the last writer has closed it
                return
            if not shown[-1]:
                return

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, stderr=child, env=environment)
    os.close(child)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    out, _ = process.communicate(timeout=300)
    reader.join(10)
    text = b"".join(shown).decode()
    assert process.returncode == 0, text
    return out.decode(), text


def lines_of(out: str) -> list[re.Match[str]]:
    return [match for line in out.splitlines() if (match := LINE.fullmatch(line))]


def test_fine_tuning_on_two_processes(repository: Path, shared_data: Path, small_gsm8k: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml"]
    command += ["--main_process_port", "0", "recipes/sft.py", "--model_name_or_path", str(shared_data / "stories260k")]
    command += ["--dataset_name", str(small_gsm8k), "--columns", "prompt=question", "completion=answer"]
    command += ["--dataset_test_split", "train", "--eval_strategy", "steps", "--eval_steps", "4"]
    command += [
        "--max_length",
        "256",
        "--per_device_train_batch_size",
        "1",
        "--max_steps",
        "6",
        "--logging_steps",
        "2",
    ]
    command += ["--save_strategy", "no", "--precision", "bf16", "--output_dir", str(tmp_path)]
    out, shown = run_on_terminal(command, repository)
    found = lines_of(out)
    assert [int(match["step"]) for match in found] == [2, 4, 6], out
    assert {match["total"] for match in found} == {"6"}
    speeds = [int(match["speed"].replace(",", "")) for match in found]
    summary = json.loads((tmp_path / "run_summary.json").read_text())
    assert speeds[-1] == pytest.approx(summary["tokens_per_second"], rel=0.2)
    assert out.count("evaluation loss") == 3  # at step 4, at the end, and in the last table
    assert "6/6" in shown
    assert re.search(r"loss \d+\.\d{4}, lr", shown)


def test_pretraining(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "recipes/pretrain.py", "--max_steps", "6", "--logging_steps", "2", "--eval_steps", "4"]
    command += ["--per_device_train_batch_size", "2", "--sample_tokens", "0", "--output_dir", str(tmp_path)]
    out, shown = run_on_terminal(command, repository)
    found = lines_of(out)
    assert [int(match["step"]) for match in found] == [1, 2, 4, 6], out
    assert "step 4/6  validation loss" in out
    assert "6/6" in shown
