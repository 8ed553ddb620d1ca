"""Flags of the guard, for any recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import steps_in_backward
from accel_scale.flags.common import _flag
from accel_scale.flags.guard_settings import POLICIES, TRAINER_POLICIES, GuardSettings, settings_from


@dataclass
class GuardArguments:
    """How to handle a step whose loss or gradient norm is not finite or spikes."""

    guard: str = _flag(
        "skip",
        "For a step whose loss or gradient norm is NaN or spikes. skip: do not take it; lower_lr: take a spike at "
        "a lower "
        "learning rate; rollback: reload the last good checkpoint and leave out the batch; stop; off.",
        choices=POLICIES,
    )
    guard_window: int = _flag(GuardSettings.window, "Number of accepted steps whose median and MAD define a spike.")
    guard_min_steps: int = _flag(GuardSettings.min_steps, "Accepted steps before spikes are looked for.")
    guard_threshold: float = _flag(
        GuardSettings.threshold, "Robust standard deviations above the median from which a step is a spike."
    )
    guard_max_skips: int = _flag(
        GuardSettings.max_skips, "Events allowed within --guard_skip_window steps; one more stops the run."
    )
    guard_skip_window: int = _flag(GuardSettings.skip_window, "See --guard_max_skips.")
    guard_lr_factor: float = _flag(GuardSettings.lr_factor, "lower_lr: factor for the learning rate.")
    guard_lr_steps: int = _flag(GuardSettings.lr_steps, "lower_lr: number of steps with the lower rate.")

    def settings(self) -> GuardSettings:
        """The resulting settings; refuses values that cannot be honoured, as `settings_from` does."""
        return settings_from(self)


@dataclass
class TrainerGuardArguments(GuardArguments):
    """`GuardArguments` without rollback, which a trainer's loop cannot do."""

    guard: str = _flag(
        "skip",
        "For a step whose loss or gradient norm is NaN or spikes. skip: do not take it; lower_lr: take a spike at a "
        "lower learning rate; stop; off: take every step.",
        choices=TRAINER_POLICIES,
    )


def guard_for(arguments: GuardArguments, optimizer: str, place: str | None) -> tuple[GuardSettings, str | None]:
    """The guard settings of a run, and a note if it cannot be guarded and the user did not ask for it.

    Args:
        optimizer: A name of ``--optim``.
        place: Where ``--guard`` was set; None if it has its default.

    Raises:
        ConfigError: for a value that cannot be honoured, or an optimizer whose steps cannot be judged.
    """
    if not steps_in_backward(optimizer) or arguments.guard == "off":
        return arguments.settings(), None
    if place is not None:
        raise unjudgeable(optimizer, place=place)
    note = f"{optimizer} changes weights in the backward pass, so its steps are not guarded (--guard off)."
    return settings_from(replace(arguments, guard="off")), note


def unjudgeable(optimizer: str, *, place: str = "--guard") -> ConfigError:
    """The error for an optimizer whose steps cannot be guarded."""
    return ConfigError(
        f"{optimizer} changes weights in the backward pass, before the guard can check the step.",
        place=place,
        fix="use another --optim, or --guard off.",
    )
