"""Run a module that treats each token separately over slices of the rows: one slice's intermediates live at a time.

The forward pass keeps only the module's input. The backward pass runs each slice again with autograd, takes its
gradients, and sums those of the weights. Each gradient leaves one autograd function, once, so DDP's, FSDP2's and
ZeRO's hooks see an ordinary module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from accel_scale.errors import ConfigError

Forward = Callable[[torch.Tensor], torch.Tensor]
_HALVES = (torch.float16, torch.bfloat16)


def num_tiles(num_tokens: int, rows: int) -> int:
    """Number of slices, of at most `rows` each, for `num_tokens`."""
    return max(1, -(-num_tokens // rows))


@torch.compiler.disable
def run_in_tiles(module: nn.Module, forward: Forward, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Apply `forward` to `x` (…, features), `rows` positions at a time; it must treat each leading position alone.

    Args:
        module: The module whose parameters `forward` uses.
        forward: Maps one tensor to one tensor with the same leading dimensions.
    """
    if num_tiles(x.shape[:-1].numel(), rows) == 1:
        return forward(x)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return _forward_in_tiles(forward, x, rows)
    call = _Call(module, forward, rows, x.device)
    # Two functions: the first saves the input, the last tensor that activation checkpointing waits for, so that its
    # recomputation ends there; the second, which computes, runs again only if a later operation needs its result.
    return _Compute.apply(_Keep.apply(x, call, *parameters), x.detach(), call)  # type: ignore[no-any-return]


class _Call:
    """State of one call of the module for running it again: autocast, random states, the incoming gradient."""

    def __init__(self, module: nn.Module, forward: Forward, rows: int, device: torch.device) -> None:
        self.module, self.forward, self.rows = module, forward, rows
        self.device_type = device.type
        self.is_autocast = torch.is_autocast_enabled(device.type)
        self.autocast_dtype = torch.get_autocast_dtype(device.type)
        self.random_state = torch.get_rng_state()
        self.device_states: tuple[list[int], list[torch.Tensor]] = ([], [])
        self.grad: torch.Tensor | None = None

    def remember_device(self, x: torch.Tensor) -> None:
        self.device_states = get_device_states(x)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the random states of the forward pass inside."""
        devices, states = self.device_states
        with torch.random.fork_rng(devices=devices, device_type=self.device_type if devices else "cuda"):
            torch.set_rng_state(self.random_state)
            set_device_states(devices, states, device_type=self.device_type)
            yield

    def tile(self, x: torch.Tensor) -> torch.Tensor:
        # Without the cache, which would keep 16-bit copies of the weights, without a graph, for later layers.
        with torch.autocast(self.device_type, self.autocast_dtype, self.is_autocast, cache_enabled=False):
            return self.forward(x)


class _Context(Protocol):
    """The context that torch passes to an autograd function, and the call it belongs to."""

    call: _Call
    link_dtype: torch.dtype
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Keep(torch.autograd.Function):
    """Saves the input; backward runs the slices again. The result only links it to `_Compute`."""

    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, call: _Call, *parameters: torch.Tensor) -> torch.Tensor:
        call.remember_device(x)
        ctx.call = call
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), call = ctx.saved_tensors, ctx.call
        grad, call.grad = call.grad, None
        needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needs)
        grad_x, grads = _backward_in_tiles(call, x, grad, needs[0])
        return (grad_x, None, *grads)


class _Compute(torch.autograd.Function):
    """Computes the slices' results; passes the incoming gradient to `_Keep`."""

    @staticmethod
    def forward(ctx: _Context, link: torch.Tensor, x: torch.Tensor, call: _Call) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.link_dtype = call, link.dtype
        return _forward_in_tiles(call.tile, x, call.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None
        ctx.call.grad = grad
        return grad.new_empty(0, dtype=ctx.link_dtype), None, None


def _slices(num_tokens: int, rows: int) -> list[slice]:
    """Slices of equal size, except for the last."""
    size = -(-num_tokens // num_tiles(num_tokens, rows))
    return [slice(begin, begin + size) for begin in range(0, num_tokens, size)]


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """(…, features) to (1, tokens, features), which modules that expect a batch accept too."""
    return x.reshape(1, -1, x.shape[-1])


def _forward_in_tiles(forward: Forward, x: torch.Tensor, rows: int) -> torch.Tensor:
    tokens = _as_rows(x)
    out: torch.Tensor | None = None
    for part in _slices(tokens.shape[1], rows):
        result = forward(tokens[:, part])
        if out is None:
            _check_result(result, tokens[:, part])
            out = result.new_empty((*x.shape[:-1], result.shape[-1]))  # no view: layers may add to it in place
        _as_rows(out)[:, part] = result
        del result
    assert out is not None
    return out


def _check_result(result: object, tile: torch.Tensor) -> None:
    if isinstance(result, torch.Tensor) and result.shape[:-1] == tile.shape[:-1]:
        return
    raise ConfigError(
        "a module of this model does not give one result for each token, so it cannot be computed in slices.",
        place="--long_rows",
        fix="leave it out.",
    )


def _backward_in_tiles(
    call: _Call, x: torch.Tensor, grad: torch.Tensor, needs_x: bool
) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
    parameters = [parameter for parameter in call.module.parameters() if parameter.requires_grad]
    tokens, grads_out = _as_rows(x), _as_rows(grad)
    grad_x = x.new_empty(x.shape) if needs_x else None
    sums = [_Sum() for _ in parameters]
    with call.again():
        for part in _slices(tokens.shape[1], call.rows):
            tile = tokens[:, part].detach().requires_grad_(needs_x)
            with torch.enable_grad():
                result = call.tile(tile)
            wanted = [tile, *parameters] if needs_x else parameters
            found = list(torch.autograd.grad(result, wanted, grads_out[:, part], allow_unused=True))
            del result
            if grad_x is not None:
                first = found.pop(0)
                _as_rows(grad_x)[:, part] = 0 if first is None else first
                del first
            for total in sums[::-1]:
                total.add(found.pop())
    return grad_x, [total.result() for total in sums]


class _Sum:
    """A weight's gradient over the slices; in fp32 if there is more than one."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        if self._total is None:
            self._total, self._dtype = grad, grad.dtype
            return
        if self._total.dtype in _HALVES:
            self._total = self._total.float()
        self._total.add_(grad)

    def result(self) -> torch.Tensor | None:
        return self._total if self._total is None else self._total.to(self._dtype)
