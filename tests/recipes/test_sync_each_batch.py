"""`--sync_each_batch` under FSDP2: the same training, with gradients really reduced after every micro-batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched_recipe import STEPS, launched, logged, recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ACCUMULATION = 3


def synced(recipe: str, folder: Path, sync: str) -> Path:
    flags = ["--global_batch_size", str(4 * ACCUMULATION), "--sync_each_batch", sync]
    return launched("fsdp2", "fp32", recipe, folder / sync, *flags)


def num_reductions(folder: Path) -> int:
    """Number of reduce-scatters that rank 0 started in the recorded step."""
    return len(recorded(folder, "c10d::_reduce_scatter_base_"))


def test_pretraining_reduces_every_micro_batch_to_the_same_gradients(tmp_path: Path) -> None:
    last, each = (synced("pretrain", tmp_path, sync) for sync in ("false", "true"))
    assert len(logged(last)) == STEPS
    for one, other in zip(logged(last), logged(each), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert num_reductions(last) > 1  # one for each group of layers
    assert num_reductions(each) == ACCUMULATION * num_reductions(last)


@pytest.mark.soak
def test_fine_tuning_reduces_every_micro_batch_to_the_same_gradients(tmp_path: Path) -> None:
    losses = []
    for sync in ("false", "true"):
        folder = synced("sft", tmp_path, sync)
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
