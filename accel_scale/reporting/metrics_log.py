"""`metrics.jsonl`: a run's measurements, one JSON object per line, written as it runs and readable at any time."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from accel_scale.disk_space import OUT_OF_SPACE

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends ``{"step": 20, "eval_loss": 1.83}`` to ``output_dir/metrics.jsonl``, a whole line at a time.

    The file is created on the first write. A new run replaces an earlier run's file; one that resumes at
    `resumed_step` keeps the lines up to that step and drops later ones, whose steps are repeated.

    Args:
        output_dir: Folder of the run; created if it is missing.
        is_main: Whether this process writes. On other processes `write` does nothing.
        resumed_step: The step the run continues from; 0 for a new run.
    """

    def __init__(self, output_dir: str | os.PathLike[str], is_main: bool, *, resumed_step: int = 0) -> None:
        self.path = Path(output_dir) / METRICS_NAME
        self._is_main, self._resumed_step = is_main, resumed_step
        self._file: FileIO | None = None
        self._waiting: list[str] = []  # lines not yet written because the disk is full

    def write(self, step: int, **values: float) -> None:
        """Add one line with `step` and every value. NaN and infinities become strings that `float` can parse."""
        if not self._is_main:
            return
        line: dict[str, Any] = {"step": int(step)}
        line.update({name: _as_json(value) for name, value in values.items()})
        self._waiting.append(json.dumps(line) + "\n")
        try:
            if self._file is None:
                self._file = self._open()
            self._write_waiting(self._file)
        except OSError as error:  # a log must not end a run: there may be space again at the next line
            if error.errno not in OUT_OF_SPACE:
                raise
            if len(self._waiting) == 1:
                print(f"warning: {self.path} cannot be written ({error.strerror}): lines wait.", file=sys.stderr)

    def close(self) -> None:
        """Close the file; a later `write` reopens it and appends."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_waiting(self, file: FileIO) -> None:
        """Write whole lines in one unbuffered call, so that readers of the file never wait for the next line."""
        lines = "".join(self._waiting).encode()
        size = os.fstat(file.fileno()).st_size
        written = 0
        try:
            written = file.write(lines)
            if written < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            if written < len(lines):
                os.ftruncate(file.fileno(), size)
        self._waiting.clear()

    def _open(self) -> FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.path) if line["step"] <= self._resumed_step]
        partial = self.path.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({name: _as_json(value) for name, value in line.items()}) + "\n" for line in kept
            )
        partial.replace(self.path)
        self._resumed_step = 2**63  # if reopened after `close`, all lines belong to this run
        return open(self.path, "ab", buffering=0)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; empty without a file. A truncated line is left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return list(parse_lines(text))


def parse_lines(text: str) -> Iterator[dict[str, Any]]:
    """The metrics in `text`, with values as floats; only complete lines that hold an object with a step."""
    for line in text.split("\n")[:-1]:  # text after the last newline is still being written
        try:
            found = json.loads(line)
        except ValueError:  # a killed writer's partial line, followed by a later run's line
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield {name: value if name == "step" else _as_float(value) for name, value in found.items()}


def _as_json(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    number = float(value)  # also converts tensors and numpy scalars
    return number if math.isfinite(number) else str(number)


def _as_float(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):  # text from another writer
        return value
