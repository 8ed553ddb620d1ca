"""Rotary embeddings for CPUs: fewer passes over memory, and no rotated copies of queries and keys.

Attention layers look their function up in their module, for all models of a family. A copy of their forward that
finds another function under that name changes one model only.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

_NAME = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
_PROBE_SIZE = 16


class _Context(Protocol):
    saved_tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Rotated(torch.autograd.Function):
    """x · cos + (-x₂, x₁) · sin, where x₁ and x₂ are the halves of the last dimension; keeps cosines and sines."""

    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        wide = x.to(torch.result_type(x, cos))
        (first, second), (of_first, of_second) = wide.chunk(2, -1), sin.chunk(2, -1)
        rotated = wide * cos
        half, other_half = rotated.chunk(2, -1)
        half.addcmul_(second, of_first, value=-1)
        other_half.addcmul_(first, of_second)
        return rotated

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (first, second), (of_first, of_second) = grad.chunk(2, -1), sin.chunk(2, -1)
        gradient = grad * cos
        half, other_half = gradient.chunk(2, -1)
        half.addcmul_(second, of_second)
        other_half.addcmul_(first, of_first, value=-1)
        return gradient.to(ctx.dtype), None, None


def fuse_rotary(model: nn.Module) -> bool:
    """Replace the forward of `model`'s attention layers where they rotate as `_Rotated`; returns whether any does."""
    found = False
    for module in model.modules():
        if "forward" not in vars(module) and (forward := _rotating(type(module).forward)) is not None:
            module.forward = types.MethodType(forward, module)
            found = True
    return found


def is_rotary(forward: object) -> bool:
    """True if `fuse_rotary` made this function."""
    own = getattr(forward, "__wrapped__", None)
    return own is not None and forward is _rotating(own)


@functools.cache
def _rotating(forward: Callable[..., object]) -> Callable[..., object] | None:
    """A copy of an attention layer's forward with `_Rotated`; None if it does not rotate, or by another formula."""
    if not isinstance(forward, types.FunctionType) or _NAME not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(_NAME)
    if own is None or not _agrees(own):
        return None
    names = {**forward.__globals__, _NAME: functools.partial(_rotated, own)}
    copied = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(copied, forward)


def _rotated(
    own: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    if cos.requires_grad or sin.requires_grad or not q.shape[-1] == k.shape[-1] == cos.shape[-1]:
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotated.apply(q, cos, sin), _Rotated.apply(k, cos, sin)


def _agrees(own: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """True if a module's own function gives the values and gradients of `_Rotated`."""
    try:
        if list(inspect.signature(own).parameters) != _PARAMETERS:
            return False
        return all(
            _agrees_in(own, dtype, unsqueeze) for dtype in (torch.float32, torch.bfloat16) for unsqueeze in (1, 2)
        )
    except Exception:  # it expects other tensors
        return False


def _agrees_in(own: Callable[..., tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype, unsqueeze_dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 5, _PROBE_SIZE) if unsqueeze_dim == 1 else (2, 5, 3, _PROBE_SIZE)
    q, k = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    cos, sin = (torch.randn(2, 5, _PROBE_SIZE, generator=generator) for _ in range(2))
    results = []
    for rotate in (own, functools.partial(_rotated, own)):
        given = [tensor.clone().requires_grad_() for tensor in (q, k)]
        out = rotate(*given, cos, sin, unsqueeze_dim=unsqueeze_dim)
        gradients = torch.autograd.grad(out[0].square().sum() + out[1].square().sum(), given)
        results.append([*out, *gradients])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    return all(
        theirs.dtype == ours.dtype
        and torch.allclose(theirs.float(), ours.float(), rtol=tolerance, atol=10 * tolerance)
        for theirs, ours in zip(*results, strict=True)
    )
