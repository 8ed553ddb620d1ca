"""Runs in a folder: their names, progress and records, which are reread only when a file has changed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.launching.folder_lock import is_taken
from accel_scale.report_page.figures import ENDS, formatted, state_of
from accel_scale.report_page.reading import RunRecords, number, read_run, table
from accel_scale.reporting.metrics_log import METRICS_NAME
from accel_scale.reporting.run_starts import STARTS_NAME
from accel_scale.reporting.summary import SUMMARY_NAME
from accel_scale.reporting.tables import format_seconds
from accel_scale.training.guard.events import EVENTS_NAME

_MARKS = (METRICS_NAME, STARTS_NAME, SUMMARY_NAME)
_FILES = (*_MARKS, EVENTS_NAME)
# Depth below the shown folder, as in outputs/search/trials/trial-3.
_DEEPEST, _MOST_RUNS, _MOST_FOLDERS = 3, 200, 5_000
# Larger logs are not read for a page that refreshes every few seconds.
MOST_LOG_BYTES = 64 * 2**20


# A log slower to read than _SOON seconds is left alone for _REST times the excess: reading uses the trainer's CPU.
_SOON, _REST = 0.05, 10.0


@dataclass(frozen=True)
class _Kept:
    stamp: tuple[object, ...]
    records: RunRecords
    fresh_until: float


_kept: dict[Path, _Kept] = {}


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: The last logged step.
        num_steps: Steps of the whole run; None if not recorded.
        seconds_left: Estimated from the last steps; None if unknown.
    """

    step: int
    num_steps: int | None = None
    seconds_left: float | None = None

    @property
    def text(self) -> str:
        """``step 120 of 400, 3 min 20 s left``."""
        whole = "" if self.num_steps is None else f" of {self.num_steps:,}"
        left = "" if self.seconds_left is None else f", {format_seconds(self.seconds_left)} left"
        return f"step {self.step:,}{whole}{left}"


def runs_below(root: Path) -> list[str]:
    """Names of the runs in a folder, as paths relative to it, most recently written first. Links are not followed."""
    found = sorted(_folders(root), key=lambda folder: -_last_written(folder))
    return [folder.relative_to(root).as_posix() for folder in found[:_MOST_RUNS]]


def folder_of(root: Path, name: str) -> Path:
    """The folder of a run listed by `runs_below`.

    Raises:
        ConfigError: for any other name.
    """
    if name not in runs_below(root):
        raise ConfigError(f"there is no run {name[:100]!r}.", place="Run", fix="pick one of the list.")
    return root / name


def records_of(folder: Path) -> RunRecords:
    """Contents of a run's folder. A log that is slow to read is not reread immediately after it grows.

    Raises:
        ConfigError: if nothing in it can be read, or a log is larger than `MOST_LOG_BYTES`.
    """
    stamp, kept = stamp_of(folder), _kept.get(folder)
    began = time.monotonic()
    if kept is not None and (kept.stamp == stamp or began < kept.fresh_until):
        return kept.records
    records = _read(folder)
    if len(_kept) > 2 * _MOST_RUNS:
        _kept.clear()
    ended = time.monotonic()
    _kept[folder] = _Kept(stamp, records, ended + _REST * max(0.0, ended - began - _SOON))
    return records


def shown_stamp(folder: Path) -> tuple[object, ...]:
    """The value of `stamp_of` at the time the records now returned by `records_of` were read."""
    kept = _kept.get(folder)
    return stamp_of(folder) if kept is None else kept.stamp


def stamp_of(folder: Path) -> tuple[object, ...]:
    """A stamp that changes whenever anything shown of a run changes."""
    stamps = []
    for name in _FILES:
        try:
            status = (folder / name).stat()
            stamps.append((status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append((0, 0))
    return (*stamps, is_taken(folder))


def progress_of(run: RunRecords) -> Progress:
    """How far a run is, and when it will finish."""
    step = run.last_step or int(number(run.summary.get("steps")) or 0)
    recorded = number(run.starts[-1].content.get("num_steps")) if run.starts else None
    num_steps = None if recorded is None else int(recorded)
    times = [seconds for _, seconds in run.series.get("step_seconds", ())][-20:]
    if run.how != "running" or num_steps is None or not times:
        return Progress(step, num_steps)
    return Progress(step, num_steps, max(0, num_steps - step) * sorted(times)[len(times) // 2])


def overview_row(root: Path, name: str) -> dict[str, str]:
    """A run as one row of the list."""
    try:
        run = records_of(root / name)
    except ConfigError as error:
        return {"run": name, "how": "unknown", "state": error.problem, "progress": "", "loss": "", "speed": ""}
    losses, speeds = run.series.get("loss", ()), run.series.get("tokens_per_second", ())
    return {
        "run": name,
        "how": state_of(run)[0],
        "state": ENDS.get(run.how, run.how),
        "progress": progress_of(run).text,
        "loss": formatted(losses[-1][1], "number") if losses else "",
        "speed": f"{formatted(speeds[-1][1], 'rate')} tokens/s" if speeds else "",
    }


def strategy_of(run: RunRecords) -> str:
    """Recipe, strategy and model of a run, in a few words."""
    recipe, strategy = run.summary.get("recipe"), run.summary.get("strategy")
    model = table(run.summary.get("settings")).get("model_name_or_path")
    return ", ".join(str(part) for part in (recipe, strategy, model and Path(str(model)).name) if part)


def _read(folder: Path) -> RunRecords:
    for name in _FILES:
        path = folder / name
        if path.is_symlink():
            raise ConfigError("is a link.", place=path.name, fix="put the file itself there.")
        if path.is_file() and path.stat().st_size > MOST_LOG_BYTES:
            raise ConfigError("is too large to be shown live.", place=path.name, fix="use accel-scale report.")
    return read_run(folder)


def _folders(root: Path) -> Iterator[Path]:
    """Folders that hold runs, including `root` itself."""
    for count, (path, names, files) in enumerate(os.walk(root), 1):
        depth = len(Path(path).relative_to(root).parts)
        names[:] = sorted(name for name in names if depth < _DEEPEST and name.isprintable() and name[0] != ".")
        if not set(_MARKS).isdisjoint(files):
            yield Path(path)
            names[:] = [name for name in names if not name.startswith("checkpoint")]
        if count >= _MOST_FOLDERS:
            return


def _last_written(folder: Path) -> float:
    times = []
    for name in _MARKS:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
