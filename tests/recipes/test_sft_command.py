"""The commands that people type: no flags, a mistake, printed settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SFT = ["recipes/sft.py"]


def launch(repository: Path, *args: str, launch_file: str | None = "cpu.yaml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    if launch_file:
        command += ["--config_file", f"accelerate_configs/{launch_file}"]
    # Accelerate's launcher prints a remark unless threads are set. Ranks that share cores take one each.
    num_threads = os.cpu_count() if launch_file == "cpu.yaml" else 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    return subprocess.run(
        [*command, *SFT, *args], cwd=repository, capture_output=True, text=True, check=False, env=environment
    )


def test_no_flags_learn_to_answer(repository: Path, tmp_path: Path) -> None:
    done = launch(repository, "--output_dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run_summary.json").read_text())
    assert summary["exact_match"]["before"]["accuracy"] <= 0.10
    assert summary["exact_match"]["after"]["accuracy"] >= 0.90
    assert summary["exact_match"]["after"]["num_questions"] == 200
    assert "held-out questions" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert '<span class="state finished">finished</span>' in page
    assert page.count("✓ right") >= 10
    assert len(page) < 400_000
    # Two tables and nothing else: no warning, and no bar where nobody is watching.
    assert done.stderr == ""
    assert "arning" not in done.stdout


def test_a_mistake_is_one_line_and_status_2(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, *SFT, "--learning_rat", "1"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "sft.py: error: command line, --learning_rat: 'learning_rat' is not a flag of sft.py. "
        "Fix: did you mean --learning_rate?"
    )


def test_settings_are_printed_with_their_origin(repository: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *SFT, "--config_file", "recipes/configs/qlora_guanaco_7b.yaml", "--print_config"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lora_r: 64  # recipes/configs/qlora_guanaco_7b.yaml:" in done.stdout
    assert "load_in_4bit: true" in done.stdout


def test_questions_before_training_do_not_disturb_zero3(repository: Path, tmp_path: Path) -> None:
    """Answering questions calls the head as a module; the loss uses its weights without calling it."""
    losses = []
    # Few tokens: the launch file computes in bf16, which is eleven times slower on a CPU without bf16 arithmetic.
    rows = ["--max_length", "96", "--per_device_train_batch_size", "1"]
    for count in ("0", "8"):
        flags = ["--max_steps", "2", "--logging_steps", "1", "--exact_match_samples", count, *rows]
        done = launch(repository, *flags, "--output_dir", str(tmp_path / count), launch_file="zero3.yaml")
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((tmp_path / count / "run_summary.json").read_text())["losses"])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
