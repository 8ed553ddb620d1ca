"""`--sync_each_batch` under FSDP2: the same training with gradients reduced after every micro-batch, really so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ACCUMULATION, STEPS = 3, 5


def launched(repository: Path, recipe: str, folder: Path, *flags: str) -> Path:
    words = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", "no"]
    words += ["--config_file", "accelerate_configs/fsdp2.yaml", f"recipes/{recipe}.py", "--output_dir", str(folder)]
    words += ["--precision", "fp32", "--max_steps", str(STEPS), "--logging_steps", "1", "--seed", "7"]
    words += ["--per_device_train_batch_size", "2", "--global_batch_size", str(4 * ACCUMULATION), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


def logged(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def num_reductions(folder: Path) -> int:
    """Reduce-scatters that rank 0 began in the step that was recorded."""
    events = json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    return sum(event.get("name") == "c10d::_reduce_scatter_base_" for event in events)


def test_pretraining_reduces_every_micro_batch_to_the_same_gradients(repository: Path, tmp_path: Path) -> None:
    flags = ["--max_length", "64", "--save_steps", "0", "--eval_steps", "0", "--sample_tokens", "0"]
    flags += ["--profile_steps", "1"]
    last, each = (
        launched(repository, "pretrain", tmp_path / sync, *flags, "--sync_each_batch", sync)
        for sync in ("false", "true")
    )
    assert len(logged(last)) == STEPS
    for one, other in zip(logged(last), logged(each), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert num_reductions(last) > 1  # of layers
    assert num_reductions(each) == ACCUMULATION * num_reductions(last)


def test_fine_tuning_reduces_every_micro_batch_to_the_same_gradients(repository: Path, tmp_path: Path) -> None:
    flags = ["--method", "full", "--save_strategy", "no", "--exact_match_samples", "0", "--num_train_epochs", "1"]
    losses = []
    for sync in ("false", "true"):
        folder = launched(repository, "sft", tmp_path / sync, *flags, "--sync_each_batch", sync)
        summary = json.loads((folder / "run_summary.json").read_text())
        losses.append([entry["loss"] for entry in logged(folder)])
        assert summary["settings"]["sync_each_batch"] is (sync == "true")
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_it_is_refused_where_it_would_do_nothing(repository: Path, tmp_path: Path) -> None:
    words = [sys.executable, "recipes/pretrain.py", "--sync_each_batch", "--output_dir", str(tmp_path)]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--sync_each_batch: " in done.stderr
    assert "saves no memory" in done.stderr
