"""Control between gradients and optimizer: read their norm, then take or drop the step, under every engine.

`StepGate` is for engines that leave gradients in ``parameter.grad`` (one process, DDP, FSDP2); DeepSpeed's gate is in
`deepspeed_control`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel_scale.training.ddp.hooks import hook_of


class StepGate:
    """Gate for gradients in ``parameter.grad``: one process, DDP, FSDP2.

    Attributes:
        holds_back: True if the next `step_as_decided` drops the step; reset by it.
        lr_factor: Factor for the learning rate in the next `step_as_decided`; reset by it.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.holds_back = False
        self.lr_factor = 1.0
        self._step = optimizer.step
        self._is_attached = False

    @property
    def has_loss_scaler(self) -> bool:
        """True if gradients are scaled, so that fp16 gradients may overflow occasionally."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.is_enabled()

    def attach(self) -> None:
        """Make `optimizer.step()`, which a trainer calls, carry out the decision."""

        @functools.wraps(self._step)  # keeps the mark by which torch's schedulers recognise the step they have wrapped
        def step(*unused: Any) -> None:
            self.step_as_decided()

        self.optimizer.step = step
        self._is_attached = True

    def detach(self) -> None:
        """Undo `attach`."""
        if self._is_attached:
            self.optimizer.step = self._step
            self._is_attached = False

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Wrap forward and backward; gradients are reduced only in the last micro-batch."""
        self.accelerator.sync_gradients = is_last  # `accumulate` counts by itself
        every_batch = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return nullcontext() if is_last or every_batch else self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of `loss`, scaled if fp16 needs it and not divided."""
        scaler = self.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def clip(self, max_grad_norm: float | None) -> float | None:
        """Clip the gradients of the global batch; returns the norm before, or None if there are none."""
        largest = max_grad_norm if max_grad_norm else float("inf")
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), largest)
        if norm is None:
            return None
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step_as_decided(self) -> None:
        """Take or drop the step, according to `holds_back` and `lr_factor`."""
        holds_back, factor = self.holds_back, self.lr_factor
        self.holds_back, self.lr_factor = False, 1.0
        if holds_back:
            self.drop()
        else:
            self.take(factor)

    def take(self, lr_factor: float = 1.0) -> None:
        """Step the optimizer; an fp16 overflow is left to the loss scaler."""
        self.optimizer._is_overflow = False  # without a loss scaler nothing else resets the value set by `drop`
        with lowered(self.optimizer.param_groups, lr_factor):
            self._step()

    def drop(self) -> None:
        """Drop the step: the optimizer does not step, the loss scale is kept, and schedules are held back.

        `AcceleratedOptimizer._is_overflow` is behind `step_was_skipped`, which Accelerate's schedulers and
        transformers' Trainer read (checked on accelerate 1.15.0; tests/unit/test_guarded_step.py fails if it changes).
        """
        hook = hook_of(self.model)
        if hook is not None and hook.is_stateful:
            hook.undo()  # its state from these gradients
        scaler = self.accelerator.scaler
        if self.has_loss_scaler:
            before = scaler.state_dict()
            scaler.update()  # ends the step for the scaler: the next gradients may be unscaled
            scaler.load_state_dict(before)
        self.optimizer._is_overflow = True
        self.zero_grad()

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.model.zero_grad()


@contextlib.contextmanager
def lowered(param_groups: list[dict[str, Any]], factor: float) -> Iterator[None]:
    """Multiply learning rates by `factor` inside; schedules, which compute from the current rates, do not see it."""
    if factor == 1.0:
        yield
        return
    before = [group["lr"].clone() if torch.is_tensor(group["lr"]) else group["lr"] for group in param_groups]
    _set_rates(param_groups, [rate * factor for rate in before])
    try:
        yield
    finally:
        _set_rates(param_groups, before)


def _set_rates(param_groups: list[dict[str, Any]], rates: list[Any]) -> None:
    for group, rate in zip(param_groups, rates, strict=True):
        if torch.is_tensor(group["lr"]):
            group["lr"].copy_(rate)  # compiled and capturable optimizers hold on to the tensor
        else:
            group["lr"] = rate
