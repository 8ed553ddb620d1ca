"""Reads a run's folder for the report; damaged lines are left out and reported."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.launching.folder_lock import is_taken
from accel_scale.reporting.metrics_log import METRICS_NAME
from accel_scale.reporting.run_starts import STARTS_NAME
from accel_scale.reporting.summary import SUMMARY_NAME
from accel_scale.secrets import without_secrets
from accel_scale.training.guard.events import EVENTS_NAME

Point = tuple[int, float]


@dataclass(frozen=True)
class RunStart:
    """One start of a run.

    Attributes:
        step: Steps taken before it.
        content: What was run and on which machine.
        how: ``finished``, ``stopped``, ``guard``, ``interrupted``, ``error``, ``running`` or ``killed``.
        why: Reason on one line; empty if there is none.
        ended: Date and time of the end; empty if none was recorded.
    """

    step: int
    content: Mapping[str, object]
    how: str
    why: str = ""
    ended: str = ""


@dataclass(frozen=True)
class RunRecords:
    """Everything recorded about a run.

    Attributes:
        folder: Folder of the run.
        series: Finite values by step, for every figure name in ``metrics.jsonl``.
        events: Guard events, each once.
        starts: Starts in order; empty for a run written by another program.
        summary: Content of ``run_summary.json``, or of the last start if there is none.
        notes: Files and lines that could not be read.
    """

    folder: Path
    series: Mapping[str, Sequence[Point]]
    events: Sequence[Mapping[str, object]] = ()
    starts: Sequence[RunStart] = ()
    summary: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def how(self) -> str:
        """How the last `RunStart` ended; without one, ``finished`` if the summary says so, else ``unknown``."""
        if self.starts:
            return self.starts[-1].how
        return "finished" if self.summary.get("finished") else "unknown"

    @property
    def last_step(self) -> int:
        """The last logged step."""
        return max((points[-1][0] for points in self.series.values() if points), default=0)


def read_run(folder: str | Path) -> RunRecords:
    """Read everything the report shows.

    Raises:
        ConfigError: if the folder holds no run, or nothing in it can be read.
    """
    path, notes = Path(folder), list[str]()
    if not path.is_dir():
        problem = "is a file." if path.exists() else "is not there."
        raise ConfigError(problem, place=str(path), fix="name the output folder of a run.")
    found = RunRecords(
        path,
        series=_series(_lines(path / METRICS_NAME, notes), path / METRICS_NAME, notes),
        events=_events(_lines(path / EVENTS_NAME, notes)),
        starts=_starts(_lines(path / STARTS_NAME, notes), is_running=is_taken(path)),
        summary=_summary(path / SUMMARY_NAME, notes),
        notes=notes,
    )
    if not found.series and not found.summary and not found.starts:
        if notes:
            raise ConfigError(notes[0], fix="name the output folder of a run.")
        raise ConfigError(
            f"holds no run: there is no {METRICS_NAME} and no {SUMMARY_NAME}.", place=str(path), fix=_instead(path)
        )
    if not found.summary and found.starts:
        return RunRecords(path, found.series, found.events, found.starts, found.starts[-1].content, notes)
    return found


def number(value: object) -> float | None:
    """`value` as a finite float; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def table(value: object) -> Mapping[str, object]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[object]:
    """`value` if it is a list, else an empty one."""
    return value if isinstance(value, list) else ()


def _instead(path: Path) -> str:
    below = sorted(each.parent.name for each in path.glob(f"*/{METRICS_NAME}"))
    return f"name one of the runs in it, as {path / below[0]}." if below else "name the output folder of a run."


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Line numbers and objects of a JSON Lines file; the last line may still be incomplete."""
    damaged: list[int] = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for at, line in enumerate(file, 1):
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    found = None
                if isinstance(found, dict):
                    yield at, found
                elif line.endswith("\n") and line.strip():
                    damaged.append(at)
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path}: cannot be read ({error.strerror}).")
        return
    if damaged:
        others = f", nor are {len(damaged) - 1} others" if len(damaged) > 1 else ""
        notes.append(f"{path}:{damaged[0]}: the line is not a JSON object{others}; left out.")


def _series(
    lines: Iterator[tuple[int, Mapping[str, object]]], path: Path, notes: list[str]
) -> Mapping[str, Sequence[Point]]:
    found: dict[str, dict[int, float]] = {}
    without: list[int] = []
    for at, line in lines:
        step = line.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            without.append(at)
            continue
        for name, value in line.items():
            figure = number(value)
            if name != "step" and figure is not None:
                found.setdefault(str(name), {})[step] = figure
    if without:
        notes.append(f"{path}:{without[0]}: the line has no step; left out.")
    return {name: sorted(points.items()) for name, points in found.items()}


def _events(lines: Iterator[tuple[int, Mapping[str, object]]]) -> list[Mapping[str, object]]:
    """Deduplicate events: a step that is repeated after a kill is judged again."""
    found = {}
    for _, event in lines:
        if number(event.get("step")) is not None:
            found[event.get("step"), str(event.get("action")), str(event.get("rows"))] = without_secrets(dict(event))
    return sorted(found.values(), key=lambda event: number(event.get("step")) or 0.0)


def _starts(lines: Iterator[tuple[int, Mapping[str, object]]], *, is_running: bool) -> list[RunStart]:
    found: list[RunStart] = []
    for _, line in lines:
        if "start" in line:
            content = without_secrets(dict(table(line["start"])))
            found.append(RunStart(int(number(content.get("step")) or 0), content, "killed"))
        elif "end" in line and found and found[-1].how == "killed":
            end, last = table(line["end"]), found[-1]
            words = [str(without_secrets(end.get(name) or "")) for name in ("how", "why", "date")]
            found[-1] = RunStart(last.step, last.content, *words)
    if found and found[-1].how == "killed" and is_running:
        found[-1] = RunStart(found[-1].step, found[-1].content, "running")
    return found


def _summary(path: Path, notes: list[str]) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        notes.append(f"{path}: cannot be read ({error.strerror or os.strerror(error.errno or 0)}).")
        return {}
    except json.JSONDecodeError as error:
        notes.append(f"{path}:{error.lineno}: is not JSON ({error.msg}).")
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path}:1: is not JSON that can be read.")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path}:1: is not a JSON object.")
        return {}
    return table(without_secrets(found))
