"""Processes that take turns, to compare the speed of training loops on a machine whose own speed drifts.

Each loop runs in a process of its own and stands still (SIGSTOP, workers included) while another has its turn of a few
steps. A ratio is of two turns that were seconds apart, so what slows the machine for longer than that slows both.
Loops call `StepClock.tick` at each step's end and know nothing else of this.
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
    """In the loop's process: times the turns that the parent hands out, and waits between them.

    `asked` and `told` are file descriptors of pipes from and to the parent. The first `warm_up` steps run at once and
    are not timed.
    """

    def __init__(self, asked: int, told: int, *, warm_up: int) -> None:
        self.asked, self.told = os.fdopen(asked), os.fdopen(told, "w", buffering=1)
        self.losses: list[float] = []
        self.left, self.started = warm_up, time.perf_counter()

    def tick(self, loss: float | None = None) -> None:
        """A step has ended; returns when the next one may begin."""
        if loss is not None:
            self.losses.append(loss)
        self.left -= 1
        if self.left == 0:
            self.told.write(f"{time.perf_counter() - self.started}\n")
            self.left = int(self.asked.readline() or 0)
            self.started = time.perf_counter()

    def result(self) -> dict[str, Any]:
        """What is known once the loop has ended."""
        return {"loss": statistics.mean(self.losses[-10:]) if self.losses else None}


class Contestant:
    """A loop's process, as the parent sees it. It stands still unless it has its turn."""

    def __init__(self, name: str, words: list[str], environment: dict[str, str], log: Path) -> None:
        """Start it and wait until its warm-up steps are over. `words` get `--pipes ASKED TOLD`, for its StepClock."""
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
        """One turn."""
        os.killpg(self.process.pid, signal.SIGCONT)
        os.write(self._ask, f"{steps}\n".encode())
        self.seconds.append(self._wait())

    def finish(self) -> dict[str, Any]:
        """Let it end. Returns what its last line, RESULT and JSON, says."""
        os.killpg(self.process.pid, signal.SIGCONT)
        os.write(self._ask, b"0\n")
        if self.process.wait() != 0:
            self._fail()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        line = next((line for line in lines[::-1] if line.startswith("RESULT ")), None)
        return json.loads(line.removeprefix("RESULT ")) if line else self._fail()

    def end(self) -> None:
        """Whatever state it is in, it and its workers are gone afterwards."""
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
            self.process.wait(10)  # it may still be writing why
        raise SystemExit(f"{self.name} failed:\n{self.log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def race(starts: list[Callable[[], Contestant]], *, turns: int, steps: int) -> list[dict[str, Any]]:
    """`turns` rounds of `steps` steps for each, every round begun by the next one. Returns what each said at its end.

    `seconds` of a result are those of its turns, in the order of the rounds.
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
