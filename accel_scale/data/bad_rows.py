"""Rows that cannot be used: how they are named, refused, skipped and counted."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field

from accel_scale.errors import ConfigError

ON_BAD_ROW = ("error", "skip")


class UnusableRow(Exception):
    """Why a row cannot be used: a reason for the tally, and a detail for the message."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class BadRow:
    """One unusable row: `place` is ``file:line`` (or ``file: row n`` where files have no lines), both 1-based.

    `reason` is short and the same for every row with this fault, so that it can be tallied; `detail` is not.
    """

    place: str
    reason: str
    detail: str = ""

    def sentence(self) -> str:
        """``reason (detail)``."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def place_of(path: str, number: int, *, counts_lines: bool) -> str:
    """``path:17`` for files that have lines, ``path: row 17`` for those that do not."""
    return f"{path}:{number}" if counts_lines else f"{path}: row {number}"


def bad_row_error(first: BadRow, num_others: int | None) -> ConfigError:
    """The error that stops a run at its first bad row; `num_others` counts the other bad ones in the same file."""
    others = ""
    if num_others:
        others = f"; {num_others} other bad row{'s' if num_others > 1 else ''} in this file"
    return ConfigError(
        f"{first.sentence()}{others}.",
        place=first.place,
        fix="repair the row, or pass --on_bad_row skip to train on the others.",
    )


@dataclass(frozen=True)
class SkipLog:
    """Skipped rows written as JSON lines to a file: one line per row, so workers and epochs can share it.

    Rows are counted once, however often an epoch or a worker comes across them. The object pickles as its path, so
    streaming data sets can carry it into DataLoader workers.
    """

    path: str

    @classmethod
    def temporary(cls) -> SkipLog:
        """A log that is deleted when this process ends."""
        handle, path = tempfile.mkstemp(prefix="accel_scale_skipped_rows_", suffix=".jsonl")
        os.close(handle)
        atexit.register(_delete_if_mine, path, os.getpid())
        return cls(path)

    def add(self, row: BadRow) -> None:
        """Append `row`; lines appended by several processes do not interleave."""
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(asdict(row)).encode() + b"\n")

    def reasons(self) -> dict[str, int]:
        """Number of skipped rows by reason, most frequent first."""
        if not os.path.exists(self.path):
            return {}
        with open(self.path, encoding="utf-8") as file:
            found = {(row["place"], row["reason"], row["detail"]) for row in map(json.loads, file)}
        return dict(Counter(reason for _, reason, _ in sorted(found)).most_common())


def _delete_if_mine(path: str, owner: int) -> None:
    """Delete `path`, but not from a forked worker, which runs the same exit handler."""
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@dataclass
class BadRowPolicy:
    """How to handle bad rows, one file after another: ``error`` or ``skip``.

    Args:
        on_bad_row: ``error`` raises a `ConfigError` for a file's first bad row; ``skip`` logs every one.
        log: Where skipped rows are recorded.
        count_others: Read a file to its end before raising, so the error can say how many more there are.
            Off for streams, where reading on may take hours.
    """

    on_bad_row: str
    log: SkipLog
    count_others: bool = True
    _first: BadRow | None = field(default=None, init=False)
    _num_seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_on_bad_row(self.on_bad_row)

    @property
    def failed(self) -> bool:
        """True if a bad row was seen under ``error``: the rows that follow are only counted."""
        return self._first is not None

    def handle(self, row: BadRow) -> None:
        """Handle a bad row; rows arrive in file order."""
        if self.on_bad_row == "skip":
            self.log.add(row)
            return
        self._first = self._first or row
        self._num_seen += 1
        if not self.count_others:
            raise bad_row_error(row, None)

    def end_of_file(self) -> None:
        """Raise the error of the file just read, if it had a bad row."""
        if self._first is not None:
            raise bad_row_error(self._first, self._num_seen - 1)


def check_on_bad_row(value: str) -> None:
    """Raise a ConfigError unless `value` is ``error`` or ``skip``."""
    if value not in ON_BAD_ROW:
        raise ConfigError(f"{value!r} is not a choice.", place="--on_bad_row", fix=f"use {' or '.join(ON_BAD_ROW)}.")
