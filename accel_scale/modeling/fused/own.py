"""Norms and gated MLPs for CPUs: the values of transformers' layers, with fewer passes over memory and less kept.

Plain torch, so they run anywhere; on CUDA, Liger's kernels gain more. The formula of a layer is not taken from its
name: a copy with random weights must give the same values and gradients.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from accel_scale.facts.names import FUSED_PARTS
from accel_scale.modeling.fused.rotary import fuse_rotary, is_rotary

_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
_PROBE_WIDTH = 16


class _Context(Protocol):
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    late: bool
    gelu: bool

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Norm(Protocol):
    weight: torch.Tensor


class _Mlp(Protocol):
    gate_proj: Callable[[torch.Tensor], torch.Tensor]
    up_proj: Callable[[torch.Tensor], torch.Tensor]
    down_proj: Callable[[torch.Tensor], torch.Tensor]


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x²) + eps) in fp32, times the weight; keeps x and one value per row.

    The result is rounded to x's dtype before it is multiplied, or, with `late`, only afterwards.
    """

    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, weight: torch.Tensor, epsilon: float, late: bool) -> torch.Tensor:
        wide = x.float()
        factor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = factor.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        ctx.late = late
        normed = torch.mul(wide, factor)
        if late:
            return normed.mul_(weight).to(x.dtype)
        normed = normed.to(x.dtype)
        return normed.mul_(weight) if weight.dtype == x.dtype else weight * normed

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, factor = ctx.saved_tensors
        dtype = torch.float32 if ctx.late else x.dtype
        normed, grad = x.float() * factor, grad.float() if ctx.late else grad
        of_weight = of_x = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed.to(dtype)).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            of_normed = (grad * weight).to(dtype).float()
            projection = (of_normed * normed).mean(-1, keepdim=True)
            of_x = torch.addcmul(of_normed, normed, projection, value=-1).mul_(factor).to(x.dtype)
        return of_x, of_weight, None, None


class _GatedProduct(torch.autograd.Function):
    """activation(gate) * up; keeps only its inputs. The activation is SiLU, or GELU by its tanh formula."""

    @staticmethod
    def forward(ctx: _Context, gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return _activated(gate, gelu).mul_(up)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        of_gate = grad * up
        if ctx.gelu:
            torch.ops.aten.gelu_backward.grad_input(of_gate, gate, approximate="tanh", grad_input=of_gate)
        else:
            torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, _activated(gate, ctx.gelu).mul_(grad), None


def _activated(gate: torch.Tensor, gelu: bool) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)


def _norm(self: _Norm, hidden_states: torch.Tensor) -> torch.Tensor:
    return _RmsNorm.apply(hidden_states, self.weight, _epsilon(self), False)  # type: ignore[no-any-return]


def _norm_around_one(self: _Norm, hidden_states: torch.Tensor) -> torch.Tensor:
    """As in Gemma, whose weights are distances from one."""
    return _RmsNorm.apply(hidden_states, 1.0 + self.weight.float(), _epsilon(self), True)  # type: ignore[no-any-return]


def _silu_mlp(self: _Mlp, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_gated(self.gate_proj(x), self.up_proj(x), gelu=False))


def _gelu_mlp(self: _Mlp, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_gated(self.gate_proj(x), self.up_proj(x), gelu=True))


def _gated(gate: torch.Tensor, up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    if gate.dtype is not up.dtype:  # an adapter in a wider dtype on one of them
        return _activated(gate, gelu) * up
    return _GatedProduct.apply(gate, up, gelu)  # type: ignore[no-any-return]


# Each forward and its name in `FUSED_PARTS`.
_FORWARDS: dict[Callable[..., torch.Tensor], str] = {
    _norm: "RMSNorm", _norm_around_one: "RMSNorm", _silu_mlp: "SwiGLU", _gelu_mlp: "GEGLU",
}  # fmt: skip


def fuse_own_layers(model: nn.Module) -> tuple[str, ...]:
    """Replace the forward of `model`'s RMSNorms, gated MLPs and rotating layers where it is known.

    Returns:
        The parts found, out of `FUSED_PARTS`.
    """
    found: dict[tuple[type, type], Callable[..., torch.Tensor] | None] = {}
    for module in model.modules():
        kind = type(module), type(getattr(module, "act_fn", None))
        if kind not in found:
            found[kind] = _equal_to(module)
        if (forward := found[kind]) is not None and "forward" not in vars(module):
            module.forward = types.MethodType(forward, module)
    parts = {_FORWARDS[forward] for forward in found.values() if forward is not None}
    if fuse_rotary(model):
        parts.add("RoPE")
    return tuple(part for part in FUSED_PARTS if part in parts)


def restore_layers(model: nn.Module) -> bool:
    """Undo `fuse_own_layers`; returns whether it had replaced anything."""
    fused = [module for module in model.modules() if _is_own(vars(module).get("forward"))]
    for module in fused:
        del module.forward
    return bool(fused)


def _is_own(forward: object) -> bool:
    function = getattr(forward, "__func__", None)
    return function in _FORWARDS or is_rotary(function)


def _equal_to(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """The forward that computes what `module` computes; None if there is none."""
    probes = [] if _is_patched(type(module)) else [*_norm_probes(module), *_mlp_probes(module)]
    for forward in _FORWARDS if probes else ():
        # A module's own forward may take other arguments or read what the copy lacks.
        with contextlib.suppress(Exception):
            if all(_agrees(probe, forward) for probe in probes):
                return forward
    return None


def _is_patched(kind: type[nn.Module]) -> bool:
    """True if the class's forward was replaced by a function from elsewhere, which may do more than compute."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return bool(vars(owner)["forward"].__module__ != owner.__module__)


def _norm_probes(module: nn.Module) -> Iterator[nn.Module]:
    if not type(module).__name__.endswith("RMSNorm") or list(vars(module)["_parameters"]) != ["weight"]:
        return
    weight = torch.randn(_PROBE_WIDTH, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        probe = copy.copy(module)
        probe._parameters = {"weight": nn.Parameter(weight.to(dtype))}
        yield probe


def _mlp_probes(module: nn.Module) -> Iterator[nn.Module]:
    if not set(_MLP_LINEARS) <= set(vars(module)["_modules"]) or vars(module)["_parameters"]:
        return
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    # Any other child is the activation function, which has no weights and is shared.
    probe._modules = dict(probe._modules)
    for name in _MLP_LINEARS:
        linear = nn.Linear(_PROBE_WIDTH, _PROBE_WIDTH)
        for parameter in linear.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        probe._modules[name] = linear
    yield probe


def _agrees(probe: nn.Module, forward: Callable[..., torch.Tensor]) -> bool:
    """True if `forward` gives the probe's own values and gradients, within the rounding of its dtype."""
    parameters = list(probe.parameters())
    dtype = parameters[0].dtype
    x = torch.randn(3, 5, _PROBE_WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for run in (type(probe).forward, forward):
        given = x.clone().requires_grad_()
        out = run(probe, given)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [given, *parameters])])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    return all(
        own.dtype == ours.dtype and torch.allclose(own.float(), ours.float(), rtol=tolerance, atol=10 * tolerance)
        for own, ours in zip(*results, strict=True)
    )


def _epsilon(norm: object) -> float:
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    return float(getattr(norm, name))
