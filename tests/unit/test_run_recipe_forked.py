"""Ranks of several runs in one launch: no rank waits for one that has failed, and no port is taken from others."""

from __future__ import annotations

import json
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


def test_every_run_is_waited_for_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{"log": str(tmp_path / f"{name}.log"), "name": name} for name in ("fails", "ends")]
    (tmp_path / "runs.json").write_text(json.dumps(runs))

    def run_once(run: dict[str, str]) -> int:
        time.sleep(0.2)
        (tmp_path / run["name"]).touch()
        return int(run["name"] == "fails")

    monkeypatch.setattr(run_recipe_forked, "preload", lambda: None)
    monkeypatch.setattr(run_recipe_forked, "run_once", run_once)
    monkeypatch.setattr(sys, "argv", ["run_recipe_forked.py", str(tmp_path / "runs.json")])
    assert run_recipe_forked.main() == 1
    assert (tmp_path / "ends").exists()
