"""`metrics.jsonl`: what a run measures, one JSON object per line, written as it goes and readable at any moment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends ``{"step": 20, "eval_loss": 1.83}`` to ``output_dir/metrics.jsonl``, a whole line at a time.

    The file is made at the first line. A run that begins replaces an earlier run's file; one that resumes at
    `resumed_step` keeps the lines up to that step and drops later ones, whose steps are taken again.

    Args:
        output_dir: Folder of the run; made where it is missing.
        is_main: Whether this process writes. On the others `write` does nothing.
        resumed_step: The step the run continues from; 0 for a run that begins.
    """

    def __init__(self, output_dir: str | os.PathLike[str], is_main: bool, *, resumed_step: int = 0) -> None:
        self.path = Path(output_dir) / METRICS_NAME
        self._is_main, self._resumed_step = is_main, resumed_step
        self._file: TextIO | None = None

    def write(self, step: int, **values: float) -> None:
        """Add one line: `step` and every value, as numbers. NaN and infinities become strings that `float` reads."""
        if not self._is_main:
            return
        if self._file is None:
            self._file = self._open()
        line: dict[str, Any] = {"step": int(step)}
        line.update({name: _as_json(value) for name, value in values.items()})
        # One write call for the whole line, and no buffer: who follows the file never waits for the next line.
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later `write` opens it again and goes on below what is there."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.path) if line["step"] <= self._resumed_step]
        partial = self.path.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({name: _as_json(value) for name, value in line.items()}) + "\n" for line in kept
            )
        partial.replace(self.path)
        self._resumed_step = 2**63  # opened again after `close`: everything below is this run's own
        return open(self.path, "a", encoding="utf-8")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; none where there is no file. A line that is cut off is left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return list(parse_lines(text))


def parse_lines(text: str) -> Iterator[dict[str, Any]]:
    """The metrics in `text`, values as floats; only whole lines that hold an object with a step count."""
    for line in text.split("\n")[:-1]:  # what follows the last line end is still being written
        try:
            found = json.loads(line)
        except ValueError:  # a killed writer's line, with a later run's line behind it
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield {name: value if name == "step" else _as_float(value) for name, value in found.items()}


def _as_json(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    number = float(value)  # also a tensor's or numpy's
    return number if math.isfinite(number) else str(number)


def _as_float(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):  # another writer's text
        return value
