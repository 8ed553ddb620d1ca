"""recipes/pretrain.py on ranks that share the model matches a run on one process, and continues in another layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def compared(repository: Path, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Rows of benchmarks/model_parallel_parity.py, which fails if a difference is above 1e-4."""
    script = str(repository / "benchmarks" / "model_parallel_parity.py")
    command = [sys.executable, script, "--results", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads((folder / "model_parallel_parity.json").read_text())["rows"]
    return rows


def test_losses_weights_and_the_saved_model_are_those_of_one_process(repository: Path, tmp_path: Path) -> None:
    layouts = ["--layouts", "tp2", "sp2", "pp2 x tp2 x fsdp2", "--resumed", "pp2, then tp2", "tp2, then ddp2"]
    rows = compared(repository, tmp_path, *layouts, "--families", "gemma", "--steps", "4")  # tied embeddings
    assert len(rows) == 5
    for row in rows:
        assert row["loss"] < 2e-6, row
        assert row["validation"] < 2e-6, row
        assert row["weights"] < 1e-4, row  # Adam makes whole steps of nearly zero gradients
        assert row["logits"] < 1e-4, row


@pytest.mark.soak
def test_every_layout_and_family(repository: Path, tmp_path: Path) -> None:
    assert len(compared(repository, tmp_path)) == 4 * 11 + 3 * 4
