"""Inputs that several launches train on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def inputs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and rows for recipes/sft.py, the same as in its soak."""
    sys.path.insert(0, str(repository / "benchmarks"))
    from sft_soak import make_inputs

    folder = tmp_path_factory.mktemp("inputs") / "inputs"
    make_inputs(folder)
    return folder
