"""Flags for the rewards of recipes/grpo.py."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.flags.common import _flag

NAMED_REWARDS = ("exact_match", "number")
FORMAT_PREFIX = "format="
_PLACE = "--rewards"


@dataclass
class RewardArguments:
    """Verifiable rewards; TRL's ``--reward_weights`` weighs them."""

    rewards: list[str] = _flag(
        ["exact_match"],
        "What a completion is rewarded for, one or several. exact_match: it is the row's answer; number: its last "
        "number is the last of the answer; format=REGEX: all of it matches; FILE.py:FUNCTION or MODULE:FUNCTION: your "
        "own, called as TRL calls reward functions.",
    )


def check_rewards(names: Sequence[str], weights: Sequence[float] | None = None) -> None:
    """Refuse ``--rewards`` and ``--reward_weights`` that cannot work, without importing the functions they name.

    Raises:
        ConfigError: for an unknown name, a pattern that does not compile, a missing file, or weights that are not
            finite or not one per reward.
    """
    if not names:
        raise ConfigError("nothing is rewarded.", place=_PLACE, fix="name one, e.g. exact_match.")
    if weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"there are {len(names)} rewards and {len(weights)} weights.",
            place="--reward_weights",
            fix="give one weight for each of --rewards, or none.",
        )
    if weights is not None and not all(math.isfinite(weight) for weight in weights):
        raise ConfigError("a weight is not a finite number.", place="--reward_weights", fix="e.g. 1.0 0.5.")
    for name in names:
        _check_name(name)


def _check_name(name: str) -> None:
    if name in NAMED_REWARDS:
        return
    if name.startswith(FORMAT_PREFIX):
        pattern = name.removeprefix(FORMAT_PREFIX)
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{pattern!r} is not a regular expression: {error}.", place=_PLACE, fix="correct it, e.g. format=\\d+."
            ) from None
        return
    where, colon, _ = name.rpartition(":")
    if not colon:
        known = ", ".join(NAMED_REWARDS)
        raise ConfigError(
            f"{name} is no reward.",
            place=_PLACE,
            fix=f"use {known}, format=REGEX, FILE.py:FUNCTION or MODULE:FUNCTION.",
        )
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f"{where} does not exist.", place=_PLACE, fix="check the path.")
