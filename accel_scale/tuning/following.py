"""Follow the `metrics.jsonl` of a running launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accel_scale.reporting.metrics_log import METRICS_NAME, parse_lines


class MetricsFollower:
    """Returns each line of ``folder/metrics.jsonl`` once, after it is complete.

    Attributes:
        seen: Names of all values seen in any line so far.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder) / METRICS_NAME
        self._offset, self._inode = 0, -1
        self.seen: set[str] = set()

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines completed since the last call; all lines if the file was replaced."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._offset, self._inode = 0, status.st_ino
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = list(parse_lines(complete.decode("utf-8", errors="replace")))
        for line in lines:
            self.seen.update(line.keys() - {"step"})
        return lines
