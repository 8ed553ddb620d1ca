"""Which optimizer steps should not be taken: non-finite values and upward spikes of loss and gradient norm.

Pure: numbers in, a decision out, the same on every process that is given the same numbers. `GuardedStep` (plain
loops) and `GuardMixin` (trainers) bring the numbers and do what was decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.training.running_estimate import RunningEstimate

POLICIES = ("off", "skip", "lower_lr", "rollback", "stop")
# sysexits.h's EX_DATAERR: what was fed in was wrong, and the same command would come here again.
GUARD_STATUS = 65
# However quiet a curve is, or few its values, less than this above the median is no spike.
_LEAST_LOSS_RATIO = 1.05
_LEAST_NORM_RATIO = 2.0
# Batches in a row, at the same weights because none was taken, that bad rows alone will hardly explain.
_NORM_SPIKES_OF_ROWS = 3


@dataclass(frozen=True)
class GuardSettings:
    """What counts as a bad step and what is done about it.

    Args:
        policy: ``skip``: the step is not taken, see also `Guard.judge`; ``lower_lr``: a spike is taken at a lower
            learning rate, what is not finite is skipped; ``rollback``: the caller loads its last good checkpoint and
            goes around the batch; ``stop``; ``off``.
        window: Accepted steps that median and MAD are taken over.
        min_steps: Accepted steps before spikes are judged; values that are not finite are caught from the first on.
        threshold: Robust standard deviations above the median that make a spike, the gradient norm's being those of
            its logarithm. A loss less than 5 % above its median, or a norm less than twice its own, never is one.
        max_skips: Events tolerated within `skip_window` steps; one more stops the run.
        skip_window: See `max_skips`.
        lr_factor, lr_steps: `lower_lr` multiplies the learning rate by this for so many steps, the spike's included.
        max_overflows: fp16 overflows in a row that are left to the loss scaler; from then on each is an event.

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
                f"{self.min_steps} steps never are in a window of {self.window}, so no spike would ever be judged.",
                place=_place("min_steps"),
                fix=f"use at most {self.window}, or a larger window.",
            )
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ConfigError(f"{self.threshold} is no distance.", place=_place("threshold"), fix="use e.g. 8.")
        if not 0 < self.lr_factor < 1:
            raise ConfigError(
                f"{self.lr_factor} does not lower the learning rate.",
                place=_place("lr_factor"),
                fix="use a number between 0 and 1, e.g. 0.1.",
            )


def _place(name: str) -> str:
    """The flag where there is one, as `GuardArguments` names them."""
    if name == "max_overflows":
        return "GuardSettings(max_overflows=)"
    return "--guard" if name == "policy" else f"--guard_{name}"


@dataclass(frozen=True)
class Decision:
    """What is done about one optimizer step.

    Attributes:
        action: ``stepped``, ``skipped``, ``lowered``, ``rollback`` or ``stop``.
        reason: Why it is not simply taken; None if it is.
        loss_threshold, grad_norm_threshold: Above which each would have been a spike; None while too little is known.
        lr_factor: The learning rate of this step is multiplied by it.
        is_event: Whether it is to be logged, as the first spike that is taken is; an fp16 overflow that the loss
            scaler handles is skipped without.
        is_overflow: The step goes to the loss scaler, which drops it and lowers its scale.
    """

    action: str
    reason: str | None = None
    loss_threshold: float | None = None
    grad_norm_threshold: float | None = None
    lr_factor: float = 1.0
    is_event: bool = False
    is_overflow: bool = False

    @property
    def taken(self) -> bool:
        """Whether the optimizer steps."""
        return self.action in ("stepped", "lowered")


class Guard:
    """Judges optimizer steps one after the other.

    Every process of a run has one and gives it the same numbers, so all of them decide alike.

    Attributes:
        settings: As given.
        num_judged: Steps judged so far; repeated ones, after a rollback, count again.
        num_events: Of them, those that were not simply taken.
    """

    def __init__(self, settings: GuardSettings | None = None) -> None:
        self.settings = settings or GuardSettings()
        self.num_judged = 0
        self.num_events = 0
        sizes = self.settings.window, self.settings.min_steps
        self._loss = RunningEstimate(*sizes, least_ratio=_LEAST_LOSS_RATIO)
        self._grad_norm = RunningEstimate(*sizes, least_ratio=_LEAST_NORM_RATIO, is_logarithmic=True)
        self._recent_events: list[int] = []
        self._overflows = 0
        self._lowered_steps_left = 0
        self._norm_spikes = 0

    def judge(self, loss: float, grad_norm: float | None, *, has_loss_scaler: bool = False) -> Decision:
        """Decide about one step from the global batch's loss and gradient norm, before it is clipped.

        Where ``skip`` has not taken three steps in a row for their norm alone, at a loss that is no spike, the fourth
        such batch says that the weights are where norms are large, and not the rows: skipping cannot lead away from
        there, a clipped step can. It is taken, and so are the next ones until a norm is no spike.

        Args:
            grad_norm: None where there is none to be had; the loss decides alone.
            has_loss_scaler: Whether gradients are scaled (fp16), so that an overflow of them alone is ordinary.
        """
        self.num_judged += 1
        settings = self.settings
        if settings.policy == "off":
            return Decision("stepped")
        finite_norm = grad_norm is None or math.isfinite(grad_norm)
        loss_threshold = self._loss.threshold(settings.threshold)
        norm_threshold = self._grad_norm.threshold(settings.threshold)
        # An overflow is ordinary where gradients are scaled, but not that of a loss which is bad by itself.
        is_overflow = has_loss_scaler and not finite_norm and not _reasons(loss, None, loss_threshold, None)
        self._overflows = self._overflows + 1 if is_overflow else 0
        if 0 < self._overflows < settings.max_overflows:
            return Decision("skipped", "fp16 overflow, left to the loss scaler", is_overflow=True)
        reasons = _reasons(loss, grad_norm, loss_threshold, norm_threshold)
        is_finite = math.isfinite(loss) and finite_norm
        is_norm_alone = bool(reasons) and is_finite and not _reasons(loss, None, loss_threshold, None)
        self._norm_spikes = self._norm_spikes + 1 if is_norm_alone and settings.policy == "skip" else 0
        if not reasons or self._norm_spikes > _NORM_SPIKES_OF_ROWS:
            self._loss.add(loss)
            if grad_norm is not None:
                self._grad_norm.add(grad_norm)
            why = self._weights_not_rows(reasons[0]) if self._norm_spikes == _NORM_SPIKES_OF_ROWS + 1 else None
            return Decision(
                "stepped", why, loss_threshold, norm_threshold, self._lr_factor(), is_event=why is not None
            )
        if is_overflow:
            reasons = [f"fp16 overflow {self._overflows} times in a row, the loss scaler does not help"]
        action, reason = self._act("; ".join(reasons), is_finite=is_finite)
        return Decision(
            action,
            reason,
            loss_threshold,
            norm_threshold,
            lr_factor=self._lr_factor() if action == "lowered" else 1.0,
            is_event=True,
            is_overflow=is_overflow,
        )

    def _weights_not_rows(self, reason: str) -> str:
        """What the log says of the first spike that is taken; those before it were not the data's fault."""
        del self._recent_events[-_NORM_SPIKES_OF_ROWS:]
        return (
            f"{reason}, as it was for the {_NORM_SPIKES_OF_ROWS} batches before with the same weights, so it is not "
            "the rows; norms are taken until they fall"
        )

    def _act(self, reason: str, *, is_finite: bool) -> tuple[str, str]:
        """What the policy does about an event, and the reason with what the budget has to say."""
        settings = self.settings
        self.num_events += 1
        self._recent_events = [at for at in self._recent_events if at > self.num_judged - settings.skip_window]
        self._recent_events.append(self.num_judged)
        if settings.policy == "stop":
            return "stop", reason
        if len(self._recent_events) > settings.max_skips:
            return "stop", (
                f"{reason}; this is event {len(self._recent_events)} within {settings.skip_window} steps, more than "
                f"the {settings.max_skips} that are tolerated"
            )
        if settings.policy == "lower_lr" and is_finite:
            self._lowered_steps_left = settings.lr_steps
            return "lowered", reason
        return ("rollback" if settings.policy == "rollback" else "skipped"), reason

    def _lr_factor(self) -> float:
        if self._lowered_steps_left == 0:
            return 1.0
        self._lowered_steps_left -= 1
        return self.settings.lr_factor

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact resume needs, as plain numbers and lists."""
        return {
            "num_judged": self.num_judged,
            "num_events": self.num_events,
            "loss": list(self._loss.values),
            "grad_norm": list(self._grad_norm.values),
            "recent_events": list(self._recent_events),
            "overflows": self._overflows,
            "lowered_steps_left": self._lowered_steps_left,
            "norm_spikes": self._norm_spikes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the guard did that `state` is of."""
        self._restore_estimates(state)
        self.num_judged, self.num_events = int(state["num_judged"]), int(state["num_events"])
        self._recent_events = [int(at) for at in state["recent_events"]]

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """After a rollback: the estimates of the checkpoint, but the events since then stay counted.

        `load_state_dict` would forget them, and a batch that fails every time would be rolled back for ever.
        """
        self._restore_estimates(state)

    def _restore_estimates(self, state: Mapping[str, Any]) -> None:
        for estimate, values in ((self._loss, state["loss"]), (self._grad_norm, state["grad_norm"])):
            estimate.values.clear()
            estimate.values.extend(float(value) for value in values)
        self._overflows = int(state["overflows"])
        self._lowered_steps_left = int(state["lowered_steps_left"])
        self._norm_spikes = int(state.get("norm_spikes", 0))  # checkpoints of earlier versions have none


def _reasons(
    loss: float, grad_norm: float | None, loss_threshold: float | None, norm_threshold: float | None
) -> list[str]:
    """What is wrong with the step, in words; nothing if it is good."""
    found = []
    for name, value, threshold in (
        ("loss", loss, loss_threshold),
        ("gradient norm", grad_norm, norm_threshold),
    ):
        if value is None:
            continue
        if not math.isfinite(value):
            found.append(f"{name} is {value}")
        elif threshold is not None and value > threshold:
            found.append(f"{name} {value:.4g} is above {threshold:.4g}")
    return found


def settings_from(arguments: Any) -> GuardSettings:
    """`GuardSettings` from flags as `GuardArguments` has them: ``guard``, ``guard_window`` …

    Raises:
        ConfigError: for a value that cannot be honoured, or one that would do nothing.
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
