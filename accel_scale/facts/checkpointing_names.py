"""Names of checkpointing policies and their meaning."""

from __future__ import annotations

import re

from accel_scale.errors import ConfigError
from accel_scale.planning.models.training_setup import TrainingSetup

_EVERY_N = re.compile(r"every_([0-9]+)")
_POLICIES = ("none", "full", "selective", "offload")


def period_of(setup: TrainingSetup) -> int:
    """Of how many layers one is checkpointed."""
    match = _EVERY_N.fullmatch(setup.checkpointing)
    return int(match.group(1)) if match else 1


def check_policy(setup: TrainingSetup) -> None:
    """Refuse what is no policy.

    Raises:
        ConfigError: with those that there are.
    """
    policy = setup.checkpointing
    if policy not in _POLICIES and not (_EVERY_N.fullmatch(policy) and period_of(setup)):
        raise ConfigError(
            f"{policy!r} is not a checkpointing policy.",
            place="checkpointing",
            fix="use none, full, every_2 (or any every_n), selective or offload.",
        )
