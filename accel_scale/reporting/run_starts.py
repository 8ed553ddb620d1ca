"""`run_starts.jsonl`: every start of a run, with its settings and plan, and how it ended."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from accel_scale.disk_space import OUT_OF_SPACE
from accel_scale.errors import first_line
from accel_scale.facts.exit_statuses import EXIT_STOPPED, GUARD_STATUS
from accel_scale.reporting.summary import described
from accel_scale.secrets import without_secrets

STARTS_NAME = "run_starts.jsonl"


def write_start(folder: str | Path, *, step: int, content: Mapping[str, object]) -> None:
    """Append a line for a start.

    Args:
        step: Steps taken before it.
        content: Description of the run.
    """
    _append(Path(folder), {"start": {"step": step, **described(dict(content))}})


def write_end(folder: str | Path, error: BaseException | None) -> None:
    """Append a line for the end of the last start; `error` is None for a run that finished."""
    how, why = end_of(error)
    dated = described({})
    _append(Path(folder), {"end": {"how": how, "why": why, "date": dated["date"]}})


def end_of(error: BaseException | None) -> tuple[str, str]:
    """``finished``, ``stopped``, ``guard``, ``interrupted`` or ``error``, and the reason on one line."""
    if error is None:
        return "finished", ""
    if isinstance(error, SystemExit):
        cause = error.__context__
        why = first_line(cause) if cause is not None else f"status {error.code}"
        if error.code == EXIT_STOPPED:
            return "stopped", "saved and stopped at a signal"
        if not error.code:
            return "finished", ""
        return ("guard" if error.code == GUARD_STATUS else "error"), why
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C"
    return "error", f"{type(error).__name__}: {first_line(error)}"


def size_of_starts(folder: str | Path) -> int:
    """Size of the file in bytes; 0 if there is none."""
    with contextlib.suppress(OSError):
        return (Path(folder) / STARTS_NAME).stat().st_size
    return 0


def has_open_start(folder: str | Path, *, since: int = 0) -> bool:
    """True if the last line is a start and lies beyond the first `since` bytes."""
    try:
        with open(Path(folder) / STARTS_NAME, "rb") as file:
            file.seek(since)
            last = file.read().splitlines()[-1:]
        return bool(last) and "start" in json.loads(last[0])
    except (OSError, ValueError):
        return False


def _append(folder: Path, entry: Mapping[str, object]) -> None:
    """Append a line; a full disk only prints a warning, since a log must not end a run."""
    path = folder / STARTS_NAME
    line = json.dumps(without_secrets(dict(entry)), default=str) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        print(f"warning: {path} cannot be written ({error.strerror}).", file=sys.stderr)
