"""The guard under model parallelism: gradients on several meshes, different weights per stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.parallel.model_parallel import ModelParallel
from accel_scale.training.guard.optimizer_control import StepGate


class ParallelGate(StepGate):
    """`StepGate` with the gradient norm over tensor-, pipeline-, sequence- and data-parallel ranks."""

    def __init__(self, accelerator: Any, shared: ModelParallel, optimizer: Any) -> None:
        super().__init__(accelerator, None, optimizer)
        self._shared = shared
        if self.has_loss_scaler:
            raise ConfigError(
                "loss scaling of fp16 is not agreed upon between ranks that share a model.",
                place="--precision",
                fix="use bf16 or fp32.",
            )

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Wrap forward and backward; gradients are reduced only in the last micro-batch."""
        self.accelerator.sync_gradients = is_last
        if self._shared.pipeline is None:  # a pipeline's schedule knows its own last micro-batch
            self._shared.sync_gradients(is_last)
        yield

    def clip(self, max_grad_norm: float | None) -> float | None:
        """Clip the gradients of the global batch; returns the norm before."""
        from accel_scale.parallel.gradient_norm import clip_gradients

        largest = max_grad_norm if max_grad_norm else float("inf")
        shared = self._shared
        counted = shared.counted_parameters()
        norm = clip_gradients(counted, largest, shared.pp_group)
        self._scale_copies(counted, float(norm), largest)
        return float(norm)

    def _scale_copies(self, counted: list[Any], norm: float, largest: float) -> None:
        """Clip gradients of weights that another stage counts by the same factor."""
        import torch

        factor = min(1.0, largest / (norm + 1e-6))  # as `clip_gradients` computes it
        known = {id(parameter) for parameter in counted}
        copies = [p for part in self._shared.parts for p in part.parameters() if id(p) not in known]
        with torch.no_grad():
            for parameter in copies:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for part in self._shared.parts:
            part.zero_grad()
