"""Decide which optimizer steps not to take: non-finite values and upward spikes of loss and gradient norm.

Pure functions of their numbers: every process that passes the same numbers gets the same decision. `GuardedStep`
(plain loops) and `GuardMixin` (trainers) collect the numbers and carry out the decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_scale.flags.guard_settings import GuardSettings
from accel_scale.training.guard.estimate import RunningEstimate

# A value less than this far above the median is no spike, however quiet the curve or few its values.
_LEAST_LOSS_RATIO = 1.05
_LEAST_NORM_RATIO = 2.0
# Number of consecutive batches, at the same weights because no step was taken, that bad rows hardly explain.
_NORM_SPIKES_OF_ROWS = 3


@dataclass(frozen=True)
class Decision:
    """The decision about one optimizer step.

    Attributes:
        action: ``stepped``, ``skipped``, ``lowered``, ``rollback`` or ``stop``.
        reason: Why the step is not simply taken; None if it is.
        loss_threshold, grad_norm_threshold: A value above it is a spike; None while there are too few values.
        lr_factor: Factor for the learning rate of this step.
        is_event: True if the decision is logged, like the first spike that is taken; an fp16 overflow left to the loss
            scaler is skipped without an event.
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
        """True if the optimizer steps."""
        return self.action in ("stepped", "lowered")


class Guard:
    """Judges optimizer steps in sequence.

    Every process of a run has its own guard and passes it the same numbers, so all of them decide alike.

    Attributes:
        settings: The guard's settings.
        num_judged: Steps judged so far; repeated ones, after a rollback, count again.
        num_events: Number of them that were not simply taken.
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
        self._num_taken = 0  # identifies the weights that a batch was computed with
        self._norm_spikes, self._spikes_at = 0, -1  # consecutive ones at the same weights, and which weights

    def judge(self, loss: float, grad_norm: float | None, *, has_loss_scaler: bool = False) -> Decision:
        """Decide about one step from the global batch's loss and its gradient norm before clipping.

        If three batches at the same weights spiked in the norm but not in the loss, and a fourth does too, the cause
        is the weights, which lie where norms are large, and not the rows: leaving out batches cannot lead away from
        there, a clipped step can. That step is taken, and so are the next ones until a norm is no spike. Weights are
        the same after a skipped step, and when an exact resume reaches the same number of steps after a rollback.

        Args:
            grad_norm: None if there is none; the loss decides alone.
            has_loss_scaler: True if gradients are scaled (fp16), so that an overflow of gradients alone is normal.
        """
        self.num_judged += 1
        settings = self.settings
        if settings.policy == "off":
            return Decision("stepped")
        finite_norm = grad_norm is None or math.isfinite(grad_norm)
        loss_threshold = self._loss.threshold(settings.threshold) if settings.loss_spikes else None
        norm_threshold = self._grad_norm.threshold(settings.threshold)
        # An overflow is normal with scaled gradients, unless the loss is bad by itself.
        is_overflow = has_loss_scaler and not finite_norm and not _reasons(loss, None, loss_threshold, None)
        self._overflows = self._overflows + 1 if is_overflow else 0
        if 0 < self._overflows < settings.max_overflows:
            return Decision("skipped", "fp16 overflow, left to the loss scaler", is_overflow=True)
        reasons = _reasons(loss, grad_norm, loss_threshold, norm_threshold)
        is_finite = math.isfinite(loss) and finite_norm
        spikes = 0
        is_norm_alone = is_finite and bool(reasons) and not _reasons(loss, None, loss_threshold, None)
        if is_norm_alone and settings.policy != "stop":
            spikes = self._norm_spike_here()
        if not reasons or spikes > _NORM_SPIKES_OF_ROWS:
            self._accept(loss, grad_norm, is_spike=spikes > 0)
            why = self._weights_not_rows(reasons[0]) if spikes == _NORM_SPIKES_OF_ROWS + 1 else None
            return Decision(
                "stepped", why, loss_threshold, norm_threshold, self._lr_factor(), is_event=why is not None
            )
        if is_overflow:
            reasons = [f"fp16 overflow {self._overflows} times in a row, the loss scaler does not help"]
        action, reason = self._act("; ".join(reasons), is_finite=is_finite)
        self._num_taken += action == "lowered"
        return Decision(
            action,
            reason,
            loss_threshold,
            norm_threshold,
            lr_factor=self._lr_factor() if action == "lowered" else 1.0,
            is_event=True,
            is_overflow=is_overflow,
        )

    def _norm_spike_here(self) -> int:
        """Count the batches at these weights, including this one, in which only the norm spiked."""
        self._norm_spikes = self._norm_spikes + 1 if self._num_taken == self._spikes_at else 1
        self._spikes_at = self._num_taken
        return self._norm_spikes

    def _accept(self, loss: float, grad_norm: float | None, *, is_spike: bool) -> None:
        self._loss.add(loss)
        if grad_norm is not None:
            self._grad_norm.add(grad_norm)
        self._num_taken += 1
        if is_spike:
            self._spikes_at = self._num_taken  # until a norm is no spike

    def _weights_not_rows(self, reason: str) -> str:
        """The log message for the first spike taken; removes the earlier events, as the rows were not at fault."""
        del self._recent_events[-_NORM_SPIKES_OF_ROWS:]
        return (
            f"{reason}, as it was for the {_NORM_SPIKES_OF_ROWS} batches before with the same weights, so it is not "
            "the rows; norms are taken until they fall"
        )

    def _act(self, reason: str, *, is_finite: bool) -> tuple[str, str]:
        """The policy's action for an event, and the reason, extended if the budget is used up."""
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
            "num_taken": self._num_taken,
            "norm_spikes": self._norm_spikes,
            "spikes_at": self._spikes_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the guard that `state` was taken from."""
        self._restore_estimates(state)
        self.num_judged, self.num_events = int(state["num_judged"]), int(state["num_events"])
        self._recent_events = [int(at) for at in state["recent_events"]]
        # Checkpoints of earlier versions lack some of them.
        self._norm_spikes, self._spikes_at = int(state.get("norm_spikes", 0)), int(state.get("spikes_at", -1))

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Restore the checkpoint's estimates after a rollback; events and norms since then stay counted.

        `load_state_dict` would forget them, and a batch that always fails would be rolled back forever.
        """
        self._restore_estimates(state)

    def _restore_estimates(self, state: Mapping[str, Any]) -> None:
        for estimate, values in ((self._loss, state["loss"]), (self._grad_norm, state["grad_norm"])):
            estimate.values.clear()
            estimate.values.extend(float(value) for value in values)
        self._overflows = int(state["overflows"])
        self._lowered_steps_left = int(state["lowered_steps_left"])
        self._num_taken = int(state.get("num_taken", 0))


def _reasons(
    loss: float, grad_norm: float | None, loss_threshold: float | None, norm_threshold: float | None
) -> list[str]:
    """The problems of a step, in words; empty if it is good."""
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
