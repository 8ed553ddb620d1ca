"""The study: its storage, sampler and pruner, and the loop that several machines may run at once."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from accel_scale.errors import ConfigError
from accel_scale.tuning.ownership import fail_abandoned, is_interrupted, retry
from accel_scale.tuning.space import SearchSpace
from accel_scale.tuning.trials import Interrupted, TrialFailed, TrialSettings, run_trial

HEARTBEAT_SECONDS, GRACE_SECONDS = 30, 120
MAX_FIRST_FAILURES = 3
_ATTRIBUTE = "accel_scale"
_MAX_ATTEMPTS = 6
_TAKEN = re.compile(r"already exists|unique constraint|duplicate|locked", re.IGNORECASE)


def open_storage(url: str, say: Callable[[str], None]) -> optuna.storages.BaseStorage:
    """Open the storage at `url`: a database by its SQLAlchemy URL, or Redis.

    Raises:
        ConfigError: if it is not a URL, its driver is missing, or it cannot be reached.
    """
    if "://" not in url:
        raise ConfigError(f"{url!r} is not a storage URL.", place="--storage", fix=f"write sqlite:///{url}.")
    try:
        if url.startswith(("redis://", "rediss://", "unix://")):
            return _open_redis(url)
        return _open_database(url, say)
    except Exception as error:
        shown = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        shown = _without_password(shown, url)
        raise ConfigError(
            f"{masked(url)} cannot be used: {shown}.", place="--storage", fix="check the URL, its driver and access."
        ) from None


def _open_redis(url: str) -> optuna.storages.BaseStorage:
    from optuna.storages.journal import JournalRedisBackend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.storages.JournalStorage(JournalRedisBackend(url))


def _open_database(url: str, say: Callable[[str], None]) -> optuna.storages.BaseStorage:
    # Writers of an SQLite file wait for each other.
    arguments = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats
                return optuna.storages.RDBStorage(
                    url,
                    engine_kwargs=arguments,
                    heartbeat_interval=HEARTBEAT_SECONDS,
                    grace_period=GRACE_SECONDS,
                    heartbeat_stale_trial_callback=lambda study, trial: retry(study, trial, say),
                )
        except Exception as error:
            # Searches that start together create the tables together, and all but one fail because these exist.
            if attempt == _MAX_ATTEMPTS or not _TAKEN.search(str(error)):
                raise
        time.sleep(0.5 * attempt)
    raise AssertionError("unreachable")


def masked(url: str) -> str:
    """`url` without its password, even if that contains an unescaped ``@``, ``/`` or ``?``."""
    scheme, _, rest = url.partition("://")
    login, at, address = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    address, question, _ = address.partition("?")  # drivers also accept passwords as parameters
    return f"{scheme}://{user}{colon and ':***'}{at}{address}{question and '?…'}"


def _without_password(text: str, url: str) -> str:
    """Mask `url` and its password in a driver's message."""
    password = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
    text = text.replace(url, masked(url))
    return text.replace(password, "***") if password else text


class PerTrialSampler(optuna.samplers.BaseSampler):
    """Creates a new sampler for each trial, seeded by the trial's number.

    A study continued after a finished trial then proposes what it would have without the break, and machines
    that share a study do not draw the same numbers. (A seeded sampler restarts its sequence in every process.)
    """

    def __init__(self, make: Callable[[int], optuna.samplers.BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._current = make(seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        # Mix the seed, since generators with neighbouring seeds start alike.
        self._current = self._make(int(np.random.SeedSequence([self._seed, trial.number]).generate_state(1)[0]))
        self._current.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._current.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._current.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> object:
        return self._current.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        self._current.after_trial(study, trial, state, values)


class _GridSampler(optuna.samplers.GridSampler):
    """Optuna's grid sampler without its stop: the loop below counts trials, and in Optuna 5.0.0 `after_trial` raised
    KeyError for a queued trial, which is not in the grid, when one point was left."""

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        pass


def make_sampler(name: str, space: SearchSpace, seed: int) -> tuple[optuna.samplers.BaseSampler, int | None]:
    """The sampler, and the number of trials that exhausts it (`None` if there is no limit)."""
    if name == "grid":
        grid = space.grid()
        size = 1
        for values in grid.values():
            size *= len(values)
        return _GridSampler(grid, seed=seed), size
    if name == "random":
        return PerTrialSampler(lambda seed: optuna.samplers.RandomSampler(seed=seed), seed), None
    # Five random trials before the model: of the default twelve trials, Optuna's ten would leave too few.
    return PerTrialSampler(lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=5), seed), None


def make_pruner(name: str, *, prune_after: int) -> optuna.pruners.BasePruner:
    """The pruner; nothing is pruned at or before step `prune_after`."""
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=prune_after + 1)
    if name == "halving":
        resource = {"min_resource": prune_after + 1} if prune_after else {}
        return optuna.pruners.SuccessiveHalvingPruner(**resource)  # type: ignore[arg-type]
    return optuna.pruners.NopPruner()


def open_study(
    storage: optuna.storages.BaseStorage,
    *,
    name: str,
    direction: str,
    sampler: optuna.samplers.BaseSampler,
    pruner: optuna.pruners.BasePruner,
    definition: Mapping[str, Any],
) -> optuna.Study:
    """Create the study, or continue it if the storage has it.

    Args:
        definition: Recipe, metric, space and fixed flags, which must not change for results to be comparable.

    Raises:
        ConfigError: if the study has another definition.
    """
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        direction=optuna.study.StudyDirection[direction.upper()],
        sampler=sampler,
        pruner=pruner,
        load_if_exists=True,
    )
    definition = json.loads(json.dumps({**definition, "direction": direction}))
    known = study.user_attrs.get(_ATTRIBUTE)
    if known is None:
        if study.get_trials(deepcopy=False):
            raise ConfigError(
                f"study {name!r} holds trials that tune.py did not make.",
                place="--study_name",
                fix="use another name.",
            )
        study.set_user_attr(_ATTRIBUTE, definition)
        return study
    for key in sorted({*known, *definition}):
        before, now = known.get(key), definition.get(key)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):
                key = next(k for k in [*before, *now] if before.get(k) != now.get(k))
                before, now = before.get(key), now.get(key)
            raise ConfigError(
                f"study {name!r} was started with {key} = {_shown(before)}, and this is {_shown(now)}: its trials "
                "could not be compared.",
                place="--study_name",
                fix="continue with the values it was started with, or use another --study_name and --output_dir.",
            )
    return study


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)


def counted_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that count towards ``--num_trials``: finished or running anywhere, but not interrupted or queued."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state != TrialState.WAITING and not is_interrupted(trial)
    ]


def search(
    study: optuna.Study,
    settings: TrialSettings,
    *,
    num_trials: int,
    timeout_seconds: float | None,
    on_end: Callable[[FrozenTrial], None],
    say: Callable[[str], None],
) -> None:
    """Run trials until the study has `num_trials` over all processes, or the time is up.

    Raises:
        ConfigError: if the first trials all failed, with the reason of the last.
        Interrupted: if asked to stop; the running trial is queued again.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    failures = 0
    while True:
        fail_abandoned(study, say)
        if settings.interrupted():
            raise Interrupted
        if len(counted_trials(study)) >= num_trials:
            return
        if deadline is not None and time.monotonic() >= deadline:
            say(f"--timeout: no further trial after {timeout_seconds:g} s")
            return
        trial = _run_next(study, settings, say)
        if trial is None:
            continue
        on_end(trial)
        if trial.state == TrialState.FAIL:
            failures += 1
        works = any(t.state in (TrialState.COMPLETE, TrialState.PRUNED) for t in study.get_trials(deepcopy=False))
        if not works and failures >= min(MAX_FIRST_FAILURES, num_trials):
            raise ConfigError(
                f"the first {failures} trial{'s' * (failures > 1)} failed, the last by: {trial.user_attrs['reason']}",
                place=str(settings.folder / str(trial.number) / "trial.log"),
                fix="fix what it says, then give the same command again.",
            )


def _run_next(study: optuna.Study, settings: TrialSettings, say: Callable[[str], None]) -> FrozenTrial | None:
    """Run one trial; returns `None` if another process has declared it stale."""
    begun: list[optuna.Trial] = []
    lost = ended = False

    def objective(trial: optuna.Trial) -> float:
        nonlocal lost, ended
        begun.append(trial)
        try:
            value = run_trial(trial, settings)
        except optuna.exceptions.UpdateFinishedTrialError:
            lost = True
            raise
        except optuna.TrialPruned:
            ended = True
            raise
        ended = True
        return value

    try:
        study.optimize(objective, n_trials=1, catch=(TrialFailed,))
    except Interrupted:
        retry(study, study.trials[begun[-1].number], say)
        raise
    except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
        if not (lost or (ended and is_interrupted(study.trials[begun[-1].number]))):
            raise
        # Its heartbeats did not arrive; the process that missed them has queued its parameters again.
        say(f"trial {begun[-1].number} was taken for dead by another process; its result is not used")
        return None
    return study.trials[begun[-1].number]
