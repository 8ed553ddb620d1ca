"""Progress during training: a bar with the latest figures on a terminal, a line per log point elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from accel_scale.reporting.tables import format_seconds
from accel_scale.units import format_bytes


@dataclass(frozen=True)
class StepFigures:
    """Figures of one log point; None where a value is not known yet."""

    loss: float
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    skipped_steps: int = 0

    def parts(self) -> list[str]:
        """``loss 2.3456``, ``lr 1.00e-03``, ``12,345 tokens/s`` …, only for known values."""
        found = [f"loss {self.loss:.4f}"]
        if self.learning_rate is not None:
            found.append(f"lr {self.learning_rate:.2e}")
        if self.tokens_per_second:
            found.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.mfu:
            found.append(f"MFU {self.mfu:.0%}")
        if self.memory_bytes:
            found.append(format_bytes(self.memory_bytes))
        if self.skipped_steps:
            found.append(f"{self.skipped_steps} skipped")
        return found


class StepLines:
    """Shows a run's progress; create it on one process only.

    If stderr is a terminal, it gets a bar. If stdout is not one (a file, a pipe, a scheduler's log), it gets one plain
    line at each log point.

    Args:
        num_steps: Optimizer steps of the whole run.
        first_step: Steps taken before this process started.
        bar: Whether to show a bar on a terminal.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        bar: bool = True,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self._num_steps, self._step = num_steps, first_step
        self._out, err = out or sys.stdout, err or sys.stderr
        self._began: tuple[int, float] | None = None
        self._bar: Any = None
        if bar and err.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_steps, initial=first_step, unit="step", dynamic_ncols=True, file=err)
        self._has_lines = self._bar is None or not self._out.isatty()

    def stepped(self, step: int) -> None:
        """Record that step `step` was taken; after a rollback the number may go down."""
        now = time.perf_counter()
        if self._began is None or step < self._step:
            self._began = step, now  # the first step pays for compilation and allocation
        self._step = step
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, figures: StepFigures) -> None:
        """Show the figures of the latest step."""
        parts = figures.parts()
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts))
        if self._has_lines:
            left = self.seconds_left
            parts += [f"{format_seconds(left)} left"] if left is not None else []
            self._print("  ".join([self._position, *parts]))

    def say(self, text: str) -> None:
        """Print one line at this step, such as a validation result; on a terminal it goes above the bar."""
        line = f"{self._position}  {text}"
        if self._bar is not None:
            self._bar.write(line, file=self._out)
        else:
            self._print(line)

    @property
    def seconds_left(self) -> float | None:
        """At the pace since this process's first step, evaluation and saving included; None before the second step."""
        if self._began is None or self._step <= self._began[0]:
            return None
        done, seconds = self._step - self._began[0], time.perf_counter() - self._began[1]
        return seconds / done * max(0, self._num_steps - self._step)

    def close(self) -> None:
        """Close the bar where it stands and move to a new line."""
        if self._bar is not None:
            self._bar.close()

    @property
    def _position(self) -> str:
        width = len(f"{self._num_steps:,}")
        return f"step {self._step:>{width},}/{self._num_steps:,}"

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)
