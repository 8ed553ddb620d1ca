"""Flags of the guard, for any recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import steps_in_backward
from accel_scale.flags.common import _flag
from accel_scale.flags.guard_settings import POLICIES, TRAINER_POLICIES, GuardSettings, settings_from


@dataclass
class GuardArguments:
    """What happens to a step whose loss or gradient norm is not finite or spikes."""

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
        """What they come to; refuses values that cannot be honoured, as `settings_from`."""
        return settings_from(self)


@dataclass
class TrainerGuardArguments(GuardArguments):
    """As `GuardArguments`, without going back, which a trainer's loop cannot."""

    guard: str = _flag(
        "skip",
        "For a step whose loss or gradient norm is NaN or spikes. skip: do not take it; lower_lr: take a spike at a "
        "lower learning rate; stop; off: take every step.",
        choices=TRAINER_POLICIES,
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
    note = f"{optimizer} changes weights in the backward pass, so its steps are not guarded (--guard off)."
    return settings_from(replace(arguments, guard="off")), note


def unjudgeable(optimizer: str, *, place: str = "--guard") -> ConfigError:
    """Why steps of `optimizer` cannot be guarded."""
    return ConfigError(
        f"{optimizer} changes weights in the backward pass, before the guard can check the step.",
        place=place,
        fix="use another --optim, or --guard off.",
    )
