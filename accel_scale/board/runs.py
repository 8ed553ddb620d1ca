"""Runs in a folder: which there are, how far each is, and its records, read again only when a file has changed."""

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
# Folders below the one that is shown: outputs/search/trials/trial-3.
_DEEPEST, _MOST_RUNS, _MOST_FOLDERS = 3, 200, 5_000
# Larger logs are not read for a page that asks every few seconds.
MOST_LOG_BYTES = 64 * 2**20


# A log that took longer to read is left alone ten times as long: it is read on one core of the machine that trains.
_SOON, _REST = 0.05, 10.0


@dataclass(frozen=True)
class _Kept:
    stamp: tuple[object, ...]
    records: RunRecords
    fresh_until: float


_kept: dict[Path, _Kept] = {}


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: The last that was logged.
        num_steps: Of the whole run; None where it is not recorded.
        seconds_left: As the last steps went; None where nothing says.
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
    """Names of the runs in a folder, as paths below it, the one written to last first. Links are not followed."""
    found = sorted(_folders(root), key=lambda folder: -_last_written(folder))
    return [folder.relative_to(root).as_posix() for folder in found[:_MOST_RUNS]]


def folder_of(root: Path, name: str) -> Path:
    """The folder of a run that `runs_below` names.

    Raises:
        ConfigError: for any other.
    """
    if name not in runs_below(root):
        raise ConfigError(f"there is no run {name[:100]!r}.", place="Run", fix="pick one of the list.")
    return root / name


def records_of(folder: Path) -> RunRecords:
    """What a run's folder holds. A log that takes long to read is not read again at once when it has grown.

    Raises:
        ConfigError: where nothing of it can be read, or a log is larger than `MOST_LOG_BYTES`.
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
    """`stamp_of` when the records were read that `records_of` returns now."""
    kept = _kept.get(folder)
    return stamp_of(folder) if kept is None else kept.stamp


def stamp_of(folder: Path) -> tuple[object, ...]:
    """Changes when anything that is shown of a run does."""
    stamps = []
    for name in _FILES:
        try:
            status = (folder / name).stat()
            stamps.append((status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append((0, 0))
    return (*stamps, is_taken(folder))


def progress_of(run: RunRecords) -> Progress:
    """Where a run is, and when it will be done."""
    step = run.last_step or int(number(run.summary.get("steps")) or 0)
    recorded = number(run.starts[-1].content.get("num_steps")) if run.starts else None
    num_steps = None if recorded is None else int(recorded)
    times = [seconds for _, seconds in run.series.get("step_seconds", ())][-20:]
    if run.how != "running" or num_steps is None or not times:
        return Progress(step, num_steps)
    return Progress(step, num_steps, max(0, num_steps - step) * sorted(times)[len(times) // 2])


def overview_row(root: Path, name: str) -> dict[str, str]:
    """A run in a line of the list."""
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
    """What ran, in a few words."""
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
    """Folders of runs, `root` itself too."""
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
