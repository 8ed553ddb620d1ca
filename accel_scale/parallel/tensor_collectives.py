"""The two operations around a tensor-parallel region: sum the gradients of its input, sum its output."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor


class SharedInput:
    """Passes one tensor to several column-parallel layers, so that their input gradients are summed in one all-reduce.

    Query, key and value projections (gate and up, in an MLP) read the same tensor. Summing its gradient over the ranks
    layer by layer costs three all-reduces (two); summing over the layers first costs one. This is Megatron's operator
    f (Shoeybi et al., 2019) for all layers of one parent module. Under autocast the tensor is cast here, once for all
    layers, and its gradient is sent in that dtype.

    Args:
        group: Ranks that hold the layers' other parts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._source: torch.Tensor | None = None
        self._shared: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` with its gradient summed over the ranks later; the same object for the same tensor."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._source is not tensor:
            self._source, self._shared = tensor, sum_gradients(_cast_for_autocast(tensor), self._group)
        assert self._shared is not None
        return self._shared

    def forget(self, *_: object) -> None:
        """Drop the tensor after the parent's forward pass; a forward hook of the parent."""
        self._source = self._shared = None


def _cast_for_autocast(tensor: torch.Tensor) -> torch.Tensor:
    device_type = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else tensor


def sum_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `tensor`; its gradient is summed over `group` in the backward pass, as each rank used a part of it."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    summed: torch.Tensor = _SumGradients.apply(tensor, group)
    return summed


def sum_values(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum `tensor` over the ranks; its gradient, equal on all of them, is passed through: Megatron's operator g."""
    summed: torch.Tensor = _SumValues.apply(tensor, group)
    return summed


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduced(grads[0], ctx.group), None


class _SumValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _all_reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce into a new tensor: selective checkpointing keeps matrix products, which must not change."""
    reduced: torch.Tensor = wait_tensor(all_reduce(tensor.contiguous(), "sum", group))
    return reduced
