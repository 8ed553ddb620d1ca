"""Which process runs a trial, and what happens to a trial whose process is gone."""

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

# A trial says who runs it within moments of being created; one that has not by then never will.
_UNOWNED_SECONDS = 60
MAX_RETRIES = 3


def owner_of_this_process() -> dict[str, Any]:
    """What a trial remembers of the process that runs it."""
    process = psutil.Process()
    return {"host": _host(), "pid": process.pid, "started": process.create_time()}


def _host() -> str:
    """This machine, and among containers that share its name, this one: process ids mean something only inside."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace}".strip()


def is_abandoned(trial: FrozenTrial) -> bool:
    """Whether `trial` is marked as running and this machine can tell that its process is gone."""
    owner = trial.user_attrs.get("owner")
    if owner is None:
        begun = trial.datetime_start
        return begun is not None and (datetime.datetime.now() - begun).total_seconds() > _UNOWNED_SECONDS
    if owner["host"] != _host():
        return False  # its heartbeat tells
    try:
        # Process ids are given out again; times of creation are not.
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) > 1
    except psutil.NoSuchProcess:
        return True


def fail_abandoned(study: optuna.Study, say: Callable[[str], None]) -> None:
    """Mark what a killed search left running as failed, and queue its parameters again.

    Of other machines' trials only the heartbeats tell, where the storage has them; it queues those itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if is_abandoned(trial):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                # Another search may have been quicker: then it has queued them.
                study.tell(trial.number, state=TrialState.FAIL)
                retry(study, trial, say)


def retry(study: optuna.Study, trial: FrozenTrial, say: Callable[[str], None]) -> None:
    """Queue the parameters of an interrupted trial again; not for ever, since they may be what brings it down."""
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
    """Whether `trial` ended because its search did, rather than by a failure of its own."""
    return trial.state == TrialState.FAIL and "reason" not in trial.user_attrs
