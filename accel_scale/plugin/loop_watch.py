"""Memory and time of a plain loop's steps, next to the planner's predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from accel_scale.settings.planned import RunPlan
from accel_scale.verifying.measured_memory import MemoryWatch, StorageTracker, _cuda_peaks, resident_tensors


class LoopWatch(MemoryWatch):
    """Measures the steps of a plain loop: on CUDA of all, elsewhere, in a single process, of the first.

        with watch.micro_batch(batch):
            ...                      # forward and backward
        watch.stepped()              # after the optimizer step

    Args:
        accelerator, model, optimizer: Prepared.
        meter: The loop's `ThroughputMeter`.
        plan: What was predicted; None measures nothing.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, meter: Any, plan: RunPlan | None) -> None:
        self._trainer = SimpleNamespace(accelerator=accelerator, model=model, optimizer=optimizer, meter=meter)
        self._plan: Any = plan
        self._is_cuda = accelerator.device.type == "cuda"
        self._peaks = self._answers = (0, 0)
        self._num_positions = 0
        can_trace = accelerator.device.type == "cpu" and accelerator.num_processes == 1
        is_traced = plan is not None and can_trace and not plan.setup.compile and not plan.setup.parallel.shards_states
        self._tracker = StorageTracker() if is_traced else None
        self._is_tracing = is_traced
        self._before = _cuda_peaks() if self._is_cuda else (0, 0)

    @contextlib.contextmanager
    def micro_batch(self, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Around forward and backward of one micro-batch."""
        self._num_positions = max(self._num_positions, batch["input_ids"].numel())
        if self._tracker is None or not self._is_tracing:
            yield
            return
        self._tracker.adopt(resident_tensors(self._trainer.model, self._trainer.optimizer))
        with self._tracker:
            yield

    def stepped(self) -> None:
        """Call after an optimizer step, before anything else allocates."""
        if self._is_cuda:
            # Evaluation and saving happen between steps: a peak of theirs is not a step's.
            now = _cuda_peaks()
            self._peaks = now if now[0] > self._before[0] or not self._peaks[0] else self._peaks
        elif self._tracker is not None and self._is_tracing:
            # The first step makes the optimizer's states after its passes; every later step has them before.
            states = resident_tensors(torch.nn.Module(), self._trainer.optimizer)
            made = sum(state.untyped_storage().nbytes() for state in states)
            self._peaks, self._is_tracing = (self._tracker.peak_bytes + made, 0), False

    def resume_watch(self) -> None:
        """Call after evaluation or saving, before the next step."""
        if self._is_cuda:
            self._before = _cuda_peaks()

    def report(self) -> dict[str, Any]:
        """As `MemoryWatch.report`; empty where nothing was planned. Call it on every rank."""
        return super().report() if self._plan is not None else {}
