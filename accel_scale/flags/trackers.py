"""Trackers that receive a run's figures: their flags, and a check before loading that they are installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.flags.common import _flag

DEFAULT_PROJECT = "accel-scale"


@dataclass(frozen=True)
class Tracker:
    """One choice of ``--report_to``.

    Attributes:
        modules: The tracker is installed if any of these can be imported; empty if it needs none.
        install: Arguments for ``pip install``.
        in_trainers: Whether transformers has a callback for it.
        in_loops: Whether Accelerate has a tracker for it.
    """

    modules: tuple[str, ...]
    install: str
    in_trainers: bool = True
    in_loops: bool = True


# As in transformers 5.23 and Accelerate 1.15; tests/unit/test_trackers.py compares.
TRACKERS: Mapping[str, Tracker] = {
    "trackio": Tracker(("trackio",), "trackio"),
    "tensorboard": Tracker(("tensorboard", "tensorboardX"), "tensorboard"),
    "wandb": Tracker(("wandb",), "wandb"),
    "mlflow": Tracker(("mlflow",), "mlflow-skinny sqlalchemy alembic"),
    "clearml": Tracker(("clearml",), "clearml"),
    "comet_ml": Tracker(("comet_ml",), "comet_ml"),
    "dvclive": Tracker(("dvclive",), "dvclive"),
    "swanlab": Tracker(("swanlab",), "swanlab"),
    "aim": Tracker(("aim",), "aim", in_trainers=False),
    "azure_ml": Tracker(("azureml",), "azureml-core", in_loops=False),
    "codecarbon": Tracker(("codecarbon",), "codecarbon", in_loops=False),
    "dagshub": Tracker(("dagshub",), "dagshub mlflow", in_loops=False),
    "flyte": Tracker(("flytekit",), "flytekit", in_loops=False),
    "kubeflow": Tracker((), "", in_loops=False),
    "neptune": Tracker(("neptune",), "neptune", in_loops=False),
}


@dataclass
class TrackerArguments:
    """Where figures go in addition to the output folder."""

    report_to: list[str] = _flag(
        [],
        "Trackers that get every logged figure, one or several: trackio, tensorboard, wandb, mlflow …; all: the "
        "installed ones. They write files on this machine; wandb does until you log in.",
    )
    project: str = _flag(DEFAULT_PROJECT, "Project of the run in trackio and wandb, experiment in mlflow.")
    run_name: str | None = _flag(None, "Name of the run in a tracker.")


def chosen_trackers(report_to: Sequence[str] | str | None, *, in_trainer: bool) -> list[str]:
    """The names in ``--report_to``, with ``all`` expanded to every installed one, and without ``none``."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if "all" in names:
        names = [name for name, tracker in TRACKERS.items() if _fits(tracker, in_trainer) and _is_installed(tracker)]
    return [name for name in dict.fromkeys(names) if name != "none"]


def refuse_unknown_trackers(report_to: Sequence[str] | str | None, *, place: str, in_trainer: bool) -> None:
    """Refuse names that are not trackers, or not trackers for this kind of recipe.

    Args:
        in_trainer: Whether the recipe trains with a trainer rather than its own loop.

    Raises:
        ConfigError: for the first one.
    """
    known = [name for name, tracker in TRACKERS.items() if _fits(tracker, in_trainer)]
    for name in chosen_trackers(report_to, in_trainer=in_trainer):
        if name not in known:
            what = "a tracker of other recipes" if name in TRACKERS else "no tracker"
            raise ConfigError(f"{name} is {what}.", place=place, fix=f"choose from {', '.join(known)}, all, none.")


def require_trackers(report_to: Sequence[str] | str | None, *, place: str) -> None:
    """Refuse a tracker that is not installed, without importing any.

    Raises:
        ConfigError: with pip's command.
    """
    for name in chosen_trackers(report_to, in_trainer=True):
        tracker = TRACKERS.get(name)
        if tracker is None:
            continue
        if not _is_installed(tracker):
            raise _missing(name, name, place)
        # MLflow then keeps runs in a local database, whose dependencies its small package does not include.
        if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            for module in ("sqlalchemy", "alembic"):
                if not _can_import(module):
                    raise _missing(f"{module}, which mlflow's local database needs,", name, place)


def _missing(what: str, name: str, place: str) -> ConfigError:
    command = f"pip install {TRACKERS[name].install}"
    return ConfigError(f"{what} is not installed.", place=place, fix=f"{command}, or leave {name} out.")


def _fits(tracker: Tracker, in_trainer: bool) -> bool:
    return tracker.in_trainers if in_trainer else tracker.in_loops


def _is_installed(tracker: Tracker) -> bool:
    return not tracker.modules or any(map(_can_import, tracker.modules))


def _can_import(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
