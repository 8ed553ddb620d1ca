"""Shared fixtures: real inputs beside the checkout, and one clean accelerate state per test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two workers' worth of threads each would fight over two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads take the cores from the other processes
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


def pytest_configure() -> None:
    """Workers that test side by side share the cores; alone, a process keeps torch's choice."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real inputs that lies beside the checkout; tests that need it are skipped elsewhere."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real inputs are not there: {SHARED_DATA}")
    return SHARED_DATA
