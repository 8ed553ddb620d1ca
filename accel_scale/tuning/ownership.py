"""Records which process runs a trial, and handles trials whose process is gone."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import optuna
import psutil
from optuna.trial import FrozenTrial, TrialState

# A trial records its owner moments after it is created; one that has not done so by then never will.
_UNOWNED_SECONDS = 60
MAX_RETRIES = 3


def owner_of_this_process() -> dict[str, Any]:
    """Identity of this process, as stored in the trials it runs."""
    process = psutil.Process()
    return {"host": _host(), "pid": process.pid, "started": process.create_time()}


def _host() -> str:
    """Name of this machine plus its PID namespace, since PIDs are only meaningful inside one container."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace}".strip()


def is_abandoned(trial: FrozenTrial) -> bool:
    """True if this machine can tell that the process of a running `trial` is gone."""
    owner = trial.user_attrs.get("owner")
    if owner is None:
        begun = trial.datetime_start
        return begun is not None and (datetime.datetime.now() - begun).total_seconds() > _UNOWNED_SECONDS
    if owner["host"] != _host():
        return False  # left to its heartbeat
    try:
        # PIDs are reused; creation times are not.
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) > 1
    except psutil.NoSuchProcess:
        return True


def fail_abandoned(study: optuna.Study, say: Callable[[str], None]) -> None:
    """Mark trials that a killed search left running as failed, and queue their parameters again.

    Trials of other machines are detected only by heartbeats, if the storage has them; it queues those itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if is_abandoned(trial):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                # If another search was quicker, it has already queued them.
                study.tell(trial.number, state=TrialState.FAIL)
                retry(study, trial, say)


def retry(study: optuna.Study, trial: FrozenTrial, say: Callable[[str], None]) -> None:
    """Requeue the parameters of an interrupted trial, up to a limit, since they may be the cause."""
    retries = trial.user_attrs.get("retries", 0) + 1
    if not trial.params:
        say(f"trial {trial.number} was interrupted before it had parameters")
    elif retries > MAX_RETRIES:
        say(f"trial {trial.number} was interrupted for the {retries}th time; its parameters are not tried again")
    else:
        attributes = {"retry_of": trial.user_attrs.get("retry_of", trial.number), "retries": retries}
        study.enqueue_trial(trial.params, user_attrs=attributes)
        say(f"trial {trial.number} was interrupted; its parameters are queued again")


def is_interrupted(trial: FrozenTrial) -> bool:
    """True if `trial` ended because its search ended, rather than by its own failure."""
    return trial.state == TrialState.FAIL and "reason" not in trial.user_attrs
