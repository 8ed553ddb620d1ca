"""A loss whose backward pass can run twice: first for gradients of inputs, later for those of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def repeatable(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `loss` for schedules that split the backward pass.

    These run the node shared by hidden states and the head's weights twice, and the chunked head's gives its gradients
    away the first time. Here gradients are computed in the forward pass and kept until the second time; they take the
    size of the head for each micro-batch whose weight gradients are pending.
    """
    return functools.partial(_split, loss)


def _split(loss: Callable[..., torch.Tensor], part: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
    weights = [parameter for parameter in part.get_output_embeddings().parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled():
        return loss(part, hidden, *args, **options)
    return _Repeatable.apply(lambda states: loss(part, states, *args, **options), hidden, *weights)


class _Repeatable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Callable[..., torch.Tensor], hidden: torch.Tensor, *weights: torch.Tensor) -> Any:
        with torch.enable_grad():
            states = hidden.detach().requires_grad_()
            value = loss(states)
            grads = torch.autograd.grad(value, (states, *weights))
        ctx.save_for_backward(*grads)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return (None, *(grad * grad_outputs[0] for grad in ctx.saved_tensors))
