"""What a run's folder holds, read for the report: a line that is damaged is left out, and said."""

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
        step: Steps that were taken before it.
        content: What was run, on what.
        how: ``finished``, ``stopped``, ``guard``, ``interrupted``, ``error``, ``running`` or ``killed``.
        why: In a line, where there is more to say.
        ended: Date and time; empty where no end was written.
    """

    step: int
    content: Mapping[str, object]
    how: str
    why: str = ""
    ended: str = ""


@dataclass(frozen=True)
class RunRecords:
    """What is known of a run.

    Attributes:
        folder: Where it is.
        series: Every figure by its name in ``metrics.jsonl``, by step; only finite ones.
        events: Of the guard, each once.
        starts: In order; none of a run that other programs wrote.
        summary: ``run_summary.json``; what the last start says, where a run has none.
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
        """As a `RunStart` says; ``finished`` where the summary does, else ``unknown``."""
        if self.starts:
            return self.starts[-1].how
        return "finished" if self.summary.get("finished") else "unknown"

    @property
    def last_step(self) -> int:
        """The last that was logged."""
        return max((points[-1][0] for points in self.series.values() if points), default=0)


def read_run(folder: str | Path) -> RunRecords:
    """Read everything the report shows.

    Raises:
        ConfigError: where the folder holds no run, or nothing of it can be read.
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
    """A finite number; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def table(value: object) -> Mapping[str, object]:
    """A mapping; empty for everything else."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[object]:
    """A list; empty for everything else."""
    return value if isinstance(value, list) else ()


def _instead(path: Path) -> str:
    below = sorted(each.parent.name for each in path.glob(f"*/{METRICS_NAME}"))
    return f"name one of the runs in it, as {path / below[0]}." if below else "name the output folder of a run."


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Objects of a file with one on each line, and their line numbers; the last line may still be being written."""
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
    """Each once: a step that is taken again after a kill is judged again."""
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
