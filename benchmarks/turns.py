"""Processes that take turns, to compare the speed of training loops on a machine whose speed drifts.

Each loop runs in its own process and is paused (SIGSTOP, including workers) while another has its turn of a few steps.
Ratios are between turns that are seconds apart, so anything that slows the machine for longer affects both. Loops only
need to call `StepClock.tick` at the end of each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class StepClock:
    """Used in the loop's process: times the turns assigned by the parent, and waits between them.

    `asked` and `told` are file descriptors of pipes from and to the parent. The first `warm_up` steps run at once and
    are not timed.
    """

    def __init__(self, asked: int, told: int, *, warm_up: int) -> None:
        self.asked, self.told = os.fdopen(asked), os.fdopen(told, "w", buffering=1)
        self.losses: list[float] = []
        self.left, self.started = warm_up, time.perf_counter()

    def tick(self, loss: float | None = None) -> None:
        """Call at the end of a step; returns when the next one may begin."""
        if loss is not None:
            self.losses.append(loss)
        self.left -= 1
        if self.left == 0:
            self.told.write(f"{time.perf_counter() - self.started}\n")
            self.left = int(self.asked.readline() or 0)
            self.started = time.perf_counter()

    def result(self) -> dict[str, Any]:
        """Result after the loop has ended."""
        return {"loss": statistics.mean(self.losses[-10:]) if self.losses else None}


class Contestant:
    """A loop's process as seen by the parent; it is paused unless it has its turn."""

    def __init__(self, name: str, words: list[str], environment: dict[str, str], log: Path) -> None:
        """Start it and wait for its warm-up steps. `--pipes ASKED TOLD` is added to `words` for its StepClock."""
        asked, self._ask = os.pipe()
        tell, told = os.pipe()
        self.name, self.log, self.seconds = name, log, list[float]()
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [*words, "--pipes", str(asked), str(told)],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment, pass_fds=(asked, told), start_new_session=True,
            )  # fmt: skip
        os.close(asked)
        os.close(told)
        self._told = os.fdopen(tell)
        try:
            self._wait()
        except BaseException:
            self.end()
            raise

    def take(self, steps: int) -> None:
        """Run one turn."""
        os.killpg(self.process.pid, signal.SIGCONT)
        os.write(self._ask, f"{steps}\n".encode())
        self.seconds.append(self._wait())

    def finish(self) -> dict[str, Any]:
        """Let it end; returns the JSON of its last RESULT line."""
        os.killpg(self.process.pid, signal.SIGCONT)
        os.write(self._ask, b"0\n")
        if self.process.wait() != 0:
            self._fail()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        line = next((line for line in lines[::-1] if line.startswith("RESULT ")), None)
        return json.loads(line.removeprefix("RESULT ")) if line else self._fail()

    def end(self) -> None:
        """Kill it and its workers, whatever their state."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._told.close()
        os.close(self._ask)

    def _wait(self) -> float:
        line = self._told.readline()
        if not line:
            self._fail()
        os.killpg(self.process.pid, signal.SIGSTOP)
        return float(line)

    def _fail(self) -> Any:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)  # it may still be writing the reason
        raise SystemExit(f"{self.name} failed:\n{self.log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def race(starts: list[Callable[[], Contestant]], *, turns: int, steps: int) -> list[dict[str, Any]]:
    """Run `turns` rounds of `steps` steps each, with a rotating first contestant; returns the contestants' results.

    `seconds` of a result are those of its turns, in order of the rounds.
    """
    with contextlib.ExitStack() as ends:
        contestants = []
        for start in starts:
            contestants.append(start())
            ends.callback(contestants[-1].end)
        for turn in range(turns):
            first = turn % len(contestants)
            for one in contestants[first:] + contestants[:first]:
                one.take(steps)
        return [one.finish() | {"seconds": one.seconds} for one in contestants]
