"""One trial: writes its flags, launches it, follows and reports its metrics, and makes sure it ends."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import yaml

from accel_scale.errors import ConfigError
from accel_scale.launching.launch_file import LaunchFile
from accel_scale.recipe_specs.finding import Recipe
from accel_scale.rehearsing.rehearse import error_lines
from accel_scale.tuning.following import MetricsFollower
from accel_scale.tuning.launch import TrialLaunch, launch_command
from accel_scale.tuning.ownership import owner_of_this_process
from accel_scale.tuning.space import SearchSpace

LOG_NAME, FLAGS_NAME = "trial.log", "flags.yaml"
# Files kept when a trial's model is removed: all that the table and the analysis of a failure need.
RECORDS = frozenset({LOG_NAME, FLAGS_NAME, "metrics.jsonl", "run_summary.json", "run_starts.jsonl", "report.html"})
_POLL_SECONDS = 0.2
_LOG_TAIL_LINES = 20
_LOSSES = ("loss", "eval_loss")


class TrialFailed(Exception):
    """A trial ended without a result; the message gives the reason on one line."""


class Interrupted(KeyboardInterrupt):
    """The search was asked to stop while a trial ran."""


@dataclass(frozen=True)
class TrialSettings:
    """Settings shared by all trials of a study.

    Attributes:
        folder: Parent of the trials' folders, which are named by trial number.
        fixed: Flags other than the searched ones.
        metric: Name of the value in ``metrics.jsonl`` to optimise.
        timeout_seconds: Time after which a trial counts as failed.
        interrupted: Returns whether the search was asked to stop.
        on_progress: Called with the trial's number, step and metric at each new value.
    """

    recipe: Recipe
    space: SearchSpace
    fixed: Mapping[str, Any]
    folder: Path
    metric: str
    launch_file: LaunchFile | None = None
    timeout_seconds: float | None = None
    interrupted: Callable[[], bool] = lambda: False
    on_progress: Callable[[int, int, float], None] = lambda number, step, value: None


def run_trial(trial: optuna.Trial, settings: TrialSettings) -> float:
    """Launch the recipe with the flags of `trial`; returns the metric's last value.

    Raises:
        optuna.TrialPruned: if the pruner ended it, or its metric is not finite, since a diverged trial is a bad trial.
        TrialFailed: if the launch failed, took too long, or never wrote the metric.
        Interrupted: if the search was asked to stop.
    """
    trial.set_user_attr("owner", owner_of_this_process())
    folder = settings.folder / str(trial.number)
    flags = {**settings.fixed, **settings.space.suggest(trial), "output_dir": str(folder)}
    folder.mkdir(parents=True)
    path = folder / FLAGS_NAME
    path.write_text(yaml.safe_dump(flags, sort_keys=False, allow_unicode=True), encoding="utf-8")
    command = launch_command(settings.recipe.path, path, settings.launch_file)
    launch = TrialLaunch(command, folder / LOG_NAME)
    try:
        value = _follow(trial, settings, launch, folder)
        _record_cost(trial, folder)
        return value
    except TrialFailed as failure:
        trial.set_user_attr("reason", str(failure))
        trial.set_user_attr("log_tail", log_tail(folder))
        raise
    finally:
        launch.end()


def _follow(trial: optuna.Trial, settings: TrialSettings, launch: TrialLaunch, folder: Path) -> float:
    """Report every value of the metric until the launch ends or must be ended."""
    metrics, last, started = MetricsFollower(folder), None, time.monotonic()
    status, reported = None, set[int]()
    while status is None:
        status = launch.wait(_POLL_SECONDS)
        for line in metrics.new_lines():  # including those of a launch that has just ended
            if settings.metric not in line:
                continue
            last, step = float(line[settings.metric]), line["step"]
            if step not in reported:  # a recipe that rolls back repeats steps; Optuna keeps the first value
                trial.report(last, step)
            reported.add(step)
            trial.set_user_attr("last_step", step)
            settings.on_progress(trial.number, step, last)
            if not math.isfinite(last):
                trial.set_user_attr("reason", f"{settings.metric} is {last} at step {step}")
                raise optuna.TrialPruned
            if status is None and trial.should_prune():
                raise optuna.TrialPruned
        if status is None and settings.interrupted():
            raise Interrupted
        if status is None and settings.timeout_seconds and time.monotonic() - started > settings.timeout_seconds:
            raise TrialFailed(f"no end after {settings.timeout_seconds:g} s")
    if status != 0:
        raise TrialFailed(_failure(folder, status))
    if last is None:
        seen = ", ".join(sorted(metrics.seen)) or "nothing"
        raise TrialFailed(f"no {settings.metric} in metrics.jsonl; it has {seen}")
    if last == 0 and settings.metric in _LOSSES:
        raise TrialFailed(f"{settings.metric} is exactly 0: no row had a token that the loss is taken on")
    return last


def _record_cost(trial: optuna.Trial, folder: Path) -> None:
    """Record speed and peak memory from the run's summary."""
    with contextlib.suppress(OSError, ValueError):  # a custom recipe may not write one
        summary = json.loads((folder / "run_summary.json").read_text(encoding="utf-8"))
        trial.set_user_attr("tokens_per_second", summary.get("tokens_per_second"))
        trial.set_user_attr("peak_bytes", summary.get("peak_device_bytes") or summary.get("peak_host_bytes"))


def _failure(folder: Path, status: int) -> str:
    log = (folder / LOG_NAME).read_text(encoding="utf-8", errors="replace")
    ended = f"killed by signal {status - 128}" if status > 128 else f"exit status {status}"
    return f"{error_lines(log, max_lines=1)[0].strip()} ({ended})"


def log_tail(folder: Path, num_lines: int = _LOG_TAIL_LINES) -> str:
    """The last lines of a trial's log."""
    with contextlib.suppress(OSError):
        return "\n".join((folder / LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
    return ""


def remove_model(folder: Path) -> None:
    """Remove everything in a trial's folder except its records."""
    with contextlib.suppress(FileNotFoundError):  # a trial of another machine
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in RECORDS:
                path.unlink()


def refuse_foreign_trials(names: Collection[str], numbers: Collection[int], folder: Path) -> None:
    """Refuse a folder with trials that are not in the study: two studies would overwrite each other.

    Args:
        names: Names in the folder, listed before the study is read, since other processes may add trials to it.
        numbers: Numbers of the study's trials.
        folder: Parent folder of the trials.
    """
    foreign = sorted(set(names) - {str(number) for number in numbers})
    if foreign:
        raise ConfigError(
            f"trial {foreign[0]} in {folder} is not in this study.",
            place="--output_dir",
            fix="use another --output_dir, or the --storage and --study_name that it was made with.",
        )
