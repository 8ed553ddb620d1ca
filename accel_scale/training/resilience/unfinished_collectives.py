"""After an exception on one process, make the collectives of its micro-batch that the others still wait for.

The reduced values are thrown away: every process discards the optimizer step afterwards. What matters is that the
calls are made with the order and sizes of the other processes' calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_scale.facts.strategies import Strategy
from accel_scale.training.ddp.hooks import hook_of


class CannotFinish(RuntimeError):
    """The remaining collectives are not known well enough to be made; the message says why."""


class Collectives:
    """Collectives of a model that is not wrapped: none."""

    def before_pass(self) -> None:
        """Call before each forward and backward pass."""

    def finish(self) -> None:
        """Make the missing calls.

        Raises:
            CannotFinish: if the processes can no longer be brought into step.
        """


class DdpCollectives(Collectives):
    """DDP all-reduces buckets while the last micro-batch of a step runs backward; nothing otherwise.

    Parameters without a gradient in this pass are given one of zeros, and the reducer continues as usual.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        self._ddp = ddp
        self._marks: list[tuple[nn.Parameter, int | None]] = []
        self._was_called = False
        ddp.register_forward_pre_hook(self._note_call)
        is_plain = not (ddp.static_graph or ddp.parameters_to_ignore)
        self.problem = None if is_plain else "DDP has a static graph or ignores parameters"
        self._hook = hook_of(ddp)
        if self._hook is not None and self._hook.is_stateful:
            self.problem = "PowerSGD has begun to take up the gradients of the step"

    def _note_call(self, module: nn.Module, inputs: object) -> None:
        self._was_called = True

    def before_pass(self) -> None:
        self._was_called = False
        if self._ddp.require_backward_grad_sync:
            self._marks = [(p, _version(p)) for p in self._ddp.parameters() if p.requires_grad]

    def finish(self) -> None:
        if self.problem:
            raise CannotFinish(self.problem)
        if self._hook is not None and self._hook.failed:
            raise CannotFinish("memory ran out in the hook that compresses gradients")
        ddp = self._ddp
        if not self._was_called:
            ddp._pre_forward()  # may broadcast buffers and, once, the order of the buckets
        # As at the end of DDP's forward; it decides whether the next one broadcasts buffers.
        ddp.require_forward_param_sync = ddp.require_backward_grad_sync
        if not ddp.require_backward_grad_sync:
            return
        pending = [parameter for parameter, version in self._marks if _version(parameter) == version]
        if not pending:
            return
        zero = _ZeroGradients.apply(*pending)
        if len(pending) == len(self._marks):
            ddp.reducer.prepare_for_backward([zero])  # as at the end of DDP's forward; calling it again is harmless
        zero.backward()


class UnknownCollectives(Collectives):
    """Collectives of a strategy that cannot be finished from outside."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def finish(self) -> None:
        raise CannotFinish(self._reason)


def collectives_of(model: nn.Module, *, strategy: Strategy) -> Collectives:
    """The collectives of a prepared `model`; `strategy` is the result of `strategy_of`."""
    if strategy.is_single:
        return Collectives()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return DdpCollectives(model)
    return UnknownCollectives(f"{strategy.name} leaves the processes out of step when one of them fails")


class _ZeroGradients(torch.autograd.Function):
    """A zero whose gradients are zeros that take no memory until they are accumulated."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.parameters
        )


def _version(parameter: nn.Parameter) -> int | None:
    """A number that changes whenever a gradient is accumulated."""
    return None if parameter.grad is None else parameter.grad._version
