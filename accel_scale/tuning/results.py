"""Results of a study: the best flags as a recipe file, tables, a CSV file, plots and a summary."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.finding import Recipe, plain
from accel_scale.tuning.ownership import is_interrupted
from accel_scale.tuning.recipe import FixedFlags
from accel_scale.tuning.space import SearchSpace

BEST_NAME, CSV_NAME, SUMMARY_NAME = "best.yaml", "trials.csv", "study_summary.json"
COSTS = ("tokens_per_second", "peak_bytes")  # from trials that finished and wrote a summary
_MIN_COMPLETE = 4
_PLOTS = {
    "optimization_history": "plot_optimization_history",
    "importances": "plot_param_importances",
    "slices": "plot_slice",
}


def outcome(trial: FrozenTrial) -> str:
    """``complete``, ``pruned``, ``failed``, ``interrupted``, ``running`` or ``queued``."""
    if is_interrupted(trial):
        return "interrupted"
    names = {TrialState.FAIL: "failed", TrialState.WAITING: "queued"}
    return names.get(trial.state, trial.state.name.lower())


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The completed trial with the best value; `None` if no trial completed."""
    with contextlib.suppress(ValueError):
        return study.best_trial
    return None


def last_value(trial: FrozenTrial) -> float | None:
    """The metric's last value, also for a pruned trial."""
    if trial.intermediate_values:
        return trial.intermediate_values[max(trial.intermediate_values)]
    return trial.value


def seconds_of(trial: FrozenTrial) -> float | None:
    """Duration of a trial; None if its search was killed, since the time until that was noticed would count."""
    return None if trial.duration is None or is_interrupted(trial) else trial.duration.total_seconds()


def importances(study: optuna.Study) -> dict[str, float]:
    """Share of the metric's variance that each flag explains (PED-ANOVA); empty with fewer than four complete trials.

    Flags with a single value among those trials have no share.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < _MIN_COMPLETE or len({trial.value for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = optuna.importance.get_param_importances(study)
    return {name: float(value) for name, value in found.items()}


def write_best(
    folder: Path, recipe: Recipe, space: SearchSpace, fixed: FixedFlags, best: FrozenTrial, metric: str
) -> Path:
    """Write `best.yaml`: the fixed flags and the best values, as accepted by the recipe's ``--config_file``.

    Raises:
        ConfigError: if the recipe would read a different value than was tried.
    """
    values = {**fixed.values, **space.values_of(best.params)}
    if fixed.output_dir is not None:
        values["output_dir"] = fixed.output_dir
    path = folder / BEST_NAME
    assert best.value is not None
    head = f"# {metric} {best.value:.6g}: trial {best.number} of {folder}/{CSV_NAME}.\n"
    head += f"#\n#   accelerate launch {recipe.path} --config_file {path}\n"
    partial = path.with_suffix(".partial")
    partial.write_text(head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    read = parse_flags(recipe.classes, ["--config_file", str(partial)], program=recipe.program).explicit
    for name, value in values.items():
        if plain(read[name]) != value:
            raise ConfigError(
                f"{name}: {value!r} was tried, and the recipe reads it as {plain(read[name])!r}.",
                place=str(partial),
                fix="write the value in the space as the recipe reads it.",
            )
    partial.replace(path)
    return path


def write_csv(folder: Path, trials: Sequence[FrozenTrial], space: SearchSpace) -> Path:
    """Write `trials.csv`: one line per trial, in order."""
    path = folder / CSV_NAME
    partial = path.with_suffix(".partial")
    columns = ["trial", "outcome", "value", "last_step", "seconds", *COSTS, "started", *space.dimensions, "retry_of"]
    with open(partial, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*columns, "reason"])
        writer.writeheader()
        for trial in trials:
            writer.writerow({name: "" if value is None else value for name, value in row(trial, space).items()})
    partial.replace(path)
    return path


def row(trial: FrozenTrial, space: SearchSpace) -> dict[str, Any]:
    """One trial as plain values."""
    started, seconds = trial.datetime_start, seconds_of(trial)
    return {
        "trial": trial.number,
        "outcome": outcome(trial),
        "value": last_value(trial),
        "last_step": trial.user_attrs.get("last_step"),
        "seconds": None if seconds is None else round(seconds, 1),
        **{name: trial.user_attrs.get(name) for name in COSTS},
        "started": None if started is None else started.isoformat(timespec="seconds"),
        **space.values_of(trial.params),
        "retry_of": trial.user_attrs.get("retry_of"),
        "reason": trial.user_attrs.get("reason"),
    }


def write_plots(folder: Path, study: optuna.Study) -> list[str]:
    """Write history, importances and slices as PNG files; returns their names, empty without matplotlib."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    try:
        os.environ.setdefault("MPLBACKEND", "Agg")  # before matplotlib looks for a display
        import matplotlib.pyplot as plt
        from optuna.visualization import matplotlib as plots
    except ImportError:
        return []
    written = []
    for name, function in _PLOTS.items():
        if not complete or (name == "importances" and not importances(study)):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plots are marked as experimental
            getattr(plots, function)(study)
        figure = plt.gcf()
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)
        written.append(path.name)
    return written


def summary(study: optuna.Study, space: SearchSpace, fixed: FixedFlags, shares: Mapping[str, float]) -> dict[str, Any]:
    """The study as plain values, for ``study_summary.json``."""
    trials = study.get_trials(deepcopy=False)
    best = best_trial(study)
    names = [outcome(trial) for trial in trials]
    return {
        "study": study.study_name,
        "direction": study.direction.name.lower(),
        "best": None if best is None else {**row(best, space), "value": best.value},
        "counts": {name: names.count(name) for name in sorted(set(names))},
        "importances": dict(shares),
        "space": space.describe(),
        "fixed": fixed.values,
        "trial_seconds": round(sum(seconds_of(trial) or 0.0 for trial in trials), 1),
        "trials": [
            {**row(trial, space), "value": _as_json(last_value(trial)), "log_tail": trial.user_attrs.get("log_tail")}
            for trial in trials
        ],
    }


def _as_json(value: float | None) -> float | str | None:
    """`value` for JSON, which has no NaN or infinities."""
    return value if value is None or math.isfinite(value) else str(value)
