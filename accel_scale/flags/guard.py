"""Flags of the guard, for any recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import steps_in_backward
from accel_scale.flags.common import _flag
from accel_scale.flags.guard_settings import POLICIES, GuardSettings, settings_from


@dataclass
class GuardArguments:
    """What happens to a step whose loss or gradient norm is not finite or spikes."""

    guard: str = _flag(
        "skip",
        "skip: the step is not taken; lower_lr: a spike is taken at a lower learning rate; rollback: back to the last "
        "good checkpoint and around the batch; stop; off.",
        choices=POLICIES,
    )
    guard_window: int = _flag(GuardSettings.window, "Accepted steps whose median and MAD say what a spike is.")
    guard_min_steps: int = _flag(GuardSettings.min_steps, "Accepted steps before spikes are judged.")
    guard_threshold: float = _flag(
        GuardSettings.threshold, "A spike is so many robust standard deviations above the median."
    )
    guard_max_skips: int = _flag(
        GuardSettings.max_skips, "Events tolerated within --guard_skip_window steps; one more stops the run."
    )
    guard_skip_window: int = _flag(GuardSettings.skip_window, "See --guard_max_skips.")
    guard_lr_factor: float = _flag(GuardSettings.lr_factor, "lower_lr: what the learning rate is multiplied by.")
    guard_lr_steps: int = _flag(GuardSettings.lr_steps, "lower_lr: for so many steps.")

    def settings(self) -> GuardSettings:
        """What they come to; refuses values that cannot be honoured, as `settings_from`."""
        return settings_from(self)


@dataclass
class TrainerGuardArguments(GuardArguments):
    """As `GuardArguments`, without going back, which a trainer's loop cannot."""

    guard: str = _flag(
        "skip",
        "A step whose loss or gradient norm is not finite or spikes. skip: it is not taken; lower_lr: a spike is "
        "taken at a lower learning rate; stop; off: every step is taken.",
        choices=tuple(policy for policy in POLICIES if policy != "rollback"),
    )


def guard_for(arguments: GuardArguments, optimizer: str, place: str | None) -> tuple[GuardSettings, str | None]:
    """What a run is guarded by, and a note where it cannot be and nobody has asked for it.

    Args:
        optimizer: A name of ``--optim``.
        place: Where ``--guard`` was set; None: it has its default.

    Raises:
        ConfigError: for a value that cannot be honoured, or an optimizer whose steps nobody can judge.
    """
    if not steps_in_backward(optimizer) or arguments.guard == "off":
        return arguments.settings(), None
    if place is not None:
        raise unjudgeable(optimizer, place=place)
    note = f"{optimizer} changes weights in the backward pass, so nothing guards its steps (--guard off)."
    return settings_from(replace(arguments, guard="off")), note


def unjudgeable(optimizer: str, *, place: str = "--guard") -> ConfigError:
    """Why steps of `optimizer` cannot be guarded."""
    return ConfigError(
        f"{optimizer} changes weights in the backward pass, before anybody can judge the step.",
        place=place,
        fix="use another --optim, or --guard off.",
    )
