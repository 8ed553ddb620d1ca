"""The guard's settings: what counts as a bad step, and what to do about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from accel_scale.errors import ConfigError

POLICIES = ("off", "skip", "lower_lr", "rollback", "stop")
# A trainer's loop cannot go back to a checkpoint while it runs.
TRAINER_POLICIES = tuple(policy for policy in POLICIES if policy != "rollback")


@dataclass(frozen=True)
class GuardSettings:
    """Which steps count as bad, and how they are handled.

    Args:
        policy: ``skip``: the step is not taken, see also `Guard.judge`; ``lower_lr``: a spike is taken at a lower
            learning rate, a step that is not finite is skipped; ``rollback``: the caller loads its last good
            checkpoint and goes around the batch; ``stop``; ``off``.
        window: Number of accepted steps from which median and MAD are computed.
        min_steps: Accepted steps before spikes are judged; values that are not finite are caught from the first step
            on.
        threshold: Robust standard deviations above the median that make a spike; for the gradient norm, of its
            logarithm. A loss less than 5 % above its median, or a norm less than twice its median, is never a spike.
        max_skips: Events tolerated within `skip_window` steps; one more stops the run.
        skip_window: See `max_skips`.
        lr_factor, lr_steps: `lower_lr` multiplies the learning rate by this factor for this many steps, including the
            spike's.
        loss_spikes: Whether a high loss counts as a spike. A policy gradient's loss hovers around 0 and says nothing:
            it only has to be finite.
        max_overflows: fp16 overflows in a row left to the loss scaler; every further one is an event.

    Raises:
        ConfigError: for a value that cannot be honoured.
    """

    policy: str = "skip"
    window: int = 128
    min_steps: int = 32
    threshold: float = 8.0
    max_skips: int = 10
    skip_window: int = 1000
    lr_factor: float = 0.1
    lr_steps: int = 50
    max_overflows: int = 16
    loss_spikes: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"{self.policy!r} is unknown.", place=_place("policy"), fix=f"use {', '.join(POLICIES)}."
            )
        smallest = {"window": 4, "min_steps": 2, "max_skips": 0, "skip_window": 1, "lr_steps": 1, "max_overflows": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{value} cannot be used.", place=_place(name), fix=f"use {least} or more.")
        if self.min_steps > self.window:
            raise ConfigError(
                f"{self.min_steps} steps never fit into a window of {self.window}, so no spike would ever be found.",
                place=_place("min_steps"),
                fix=f"use at most {self.window}, or a larger window.",
            )
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ConfigError(f"{self.threshold} is not a distance.", place=_place("threshold"), fix="use e.g. 8.")
        if not 0 < self.lr_factor < 1:
            raise ConfigError(
                f"{self.lr_factor} does not lower the learning rate.",
                place=_place("lr_factor"),
                fix="use a number between 0 and 1, e.g. 0.1.",
            )


def _place(name: str) -> str:
    """The flag of a setting, as `GuardArguments` names it, if there is one."""
    if name == "max_overflows":
        return "GuardSettings(max_overflows=)"
    return "--guard" if name == "policy" else f"--guard_{name}"


def settings_from(arguments: Any) -> GuardSettings:
    """`GuardSettings` from flags as `GuardArguments` has them: ``guard``, ``guard_window`` …

    Raises:
        ConfigError: for a value that cannot be honoured, or one that would have no effect.
    """
    policy = arguments.guard
    given: dict[str, Any] = {}
    for setting in fields(GuardSettings):
        value = getattr(arguments, f"guard_{setting.name}", setting.default)
        if setting.name == "policy" or value == setting.default:
            continue
        if policy == "off" or (setting.name.startswith("lr_") and policy != "lower_lr"):
            raise ConfigError(
                f"{value} does nothing with --guard {policy}.",
                place=_place(setting.name),
                fix=f"remove it, or use --guard {'lower_lr' if setting.name.startswith('lr_') else 'skip'}.",
            )
        given[setting.name] = value
    return GuardSettings(policy=policy, **given)
