"""benchmarks/turns.py: loops in separate processes take turns, each paused while another one runs."""

from __future__ import annotations

import functools
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Steps of argv[2] seconds; a thread counts the time during which the process is not stopped.
LOOP = """
import json, sys, threading, time
sys.path.insert(0, sys.argv[1])
from turns import StepClock
awake = 0
def count():
    global awake
    while True:
        time.sleep(0.01)
        awake += 1
threading.Thread(target=count, daemon=True).start()
clock = StepClock(*map(int, sys.argv[-2:]), warm_up=2)
for step in range(2 + int(sys.argv[3])):
    time.sleep(float(sys.argv[2]))
    clock.tick(loss=step)
    if sys.argv[4] == "fail" and step == 3:
        raise ValueError("the loop broke")
print("RESULT " + json.dumps({"awake": awake, **clock.result()}))
"""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import turns

    return turns


def starts(turns: Any, folder: Path, *loops: tuple[float, str], steps: int) -> list[Any]:
    return [
        functools.partial(
            turns.Contestant,
            f"loop {index}",
            [sys.executable, "-c", LOOP, str(BENCHMARKS), str(seconds), str(steps), what],
            dict(os.environ),
            folder / f"log{index}",
        )
        for index, (seconds, what) in enumerate(loops)
    ]


def test_turns_time_what_each_loop_takes_while_the_others_stand_still(turns: Any, tmp_path: Path) -> None:
    loops = starts(turns, tmp_path, (0.02, "run"), (0.04, "run"), steps=24)
    fast, slow = turns.race(loops, turns=6, steps=4)
    assert len(fast["seconds"]) == len(slow["seconds"]) == 6
    ratio = statistics.median(b / a for a, b in zip(fast["seconds"], slow["seconds"], strict=True))
    assert ratio == pytest.approx(2, rel=0.25)
    assert fast["loss"] == sum(range(16, 26)) / 10
    # Awake for its own 26 steps; the other loop's steps took twice as long.
    assert fast["awake"] * 0.01 < 26 * 0.02 + 0.5 * 26 * 0.04


def test_a_loop_that_fails_ends_the_race_and_shows_why(turns: Any, tmp_path: Path) -> None:
    loops = starts(turns, tmp_path, (0.01, "run"), (0.01, "fail"), steps=24)
    started: list[Any] = []

    def start(loop: Any) -> Any:
        started.append(loop())
        return started[-1]

    with pytest.raises(SystemExit, match=r"loop 1 failed:[\s\S]*the loop broke"):
        turns.race([functools.partial(start, loop) for loop in loops], turns=6, steps=4)
    assert [one.process.returncode for one in started] == [-signal.SIGKILL, 1]
