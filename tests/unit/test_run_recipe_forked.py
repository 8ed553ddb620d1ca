"""Ranks of several runs in one launch: none waits for one that has failed, and nobody else's port is taken."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
import run_recipe_forked


def child(seconds: float, status: int) -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(status)
    return pid


def test_a_rank_that_waits_for_a_failed_one_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_recipe_forked, "GRACE_SECONDS", 0.2)
    log, started = tmp_path / "run.log", time.monotonic()
    waiting = child(60, 0)
    assert run_recipe_forked.status_of(child(0, 3), log) == 3
    assert run_recipe_forked.status_of(waiting, log) == -9
    assert time.monotonic() - started < 10
    assert run_recipe_forked.status_of(child(0, 0), tmp_path / "other.log") == 0
