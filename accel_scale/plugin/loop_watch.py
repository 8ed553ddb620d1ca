"""Memory and time of a plain loop's steps, next to the planner's predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from accel_scale.settings.planned import RunPlan
from accel_scale.verifying.measured_memory import StepMemory, resident_tensors


class LoopWatch(StepMemory):
    """Measures the steps of a plain loop.

        with watch.micro_batch(batch):
            ...                      # forward and backward
        watch.stepped()              # after the optimizer step

    Args:
        accelerator, model, optimizer: The prepared ones.
        meter: The loop's `ThroughputMeter`.
        plan: The planner's predictions; None measures nothing.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, meter: Any, plan: RunPlan | None) -> None:
        owner = SimpleNamespace(accelerator=accelerator, model=model, optimizer=optimizer, meter=meter)
        super().__init__(owner, plan)
        self._step_begins()

    @contextlib.contextmanager
    def micro_batch(self, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Wrap the forward and backward pass of one micro-batch."""
        self._num_positions = max(self._num_positions, batch["input_ids"].numel())
        if self._tracker is None or not self._is_tracing:
            yield
            return
        self._tracker.adopt(resident_tensors(self._owner.model, self._owner.optimizer))
        with self._tracker:
            yield

    def stepped(self) -> None:
        """Call after an optimizer step, before anything else allocates."""
        if self._tracker is not None and self._is_tracing:
            # The first step creates the optimizer's states after its passes; in later steps they already exist.
            states = resident_tensors(torch.nn.Module(), self._owner.optimizer)
            made = sum(state.untyped_storage().nbytes() for state in states)
            self._peaks = (self._tracker.peak_bytes + made, 0)
        self._step_ended()

    def resume_watch(self) -> None:
        """Call after evaluation or saving, before the next step."""
        self._step_begins()
