"""A module over slices of the rows, on the tape: see `accel_scale.modeling.tiling.tiles`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.tape.families import Family
from accel_scale.planning.tape.linears import Weights
from accel_scale.planning.tape.norms import norm
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tensors import Parameter, Tensor

# Runs a module on some tokens with some weights.
Run = Callable[[Tensor, Weights], Tensor]


def tiled(ops: Ops, weights: Weights, prefix: str, x: Tensor, width: float, rows: float, run: Run) -> Tensor:
    """`run` on `x`, `rows` tokens of `width` values at a time; names of its weights begin with `prefix`."""
    sizes = [tokens * width for tokens in tile_sizes(x.numel / width, rows)]
    if len(sizes) == 1:
        return run(x, weights)
    held: list[Tensor] = []
    if ops.tape.is_recomputing:  # which ends at the last saving operation
        link = _kept(ops, weights, prefix, x, sizes, run, held)
        out = _forward(ops, weights, x, sizes, run)
    else:
        out = _forward(ops, weights, x, sizes, run)
        link = _kept(ops, weights, prefix, x, sizes, run, held)

    def backward(grad: Tensor) -> list[Tensor | None]:
        held.append(grad.view())
        return [ops.new(0, grad.itemsize)]

    return ops.tape.record(out, [link], [], backward)


def tiled_norm(ops: Ops, model: ModelFacts, family: Family, weights: Weights, name: str, x: Tensor) -> Tensor:
    """A norm of hidden states."""
    width = model.hidden_size

    def run(tile: Tensor, own: Weights) -> Tensor:
        return norm(ops, model, family, own, name, tile, tile.numel / width, width)

    return tiled(ops, weights, name, x, width, width if weights.setup.long_rows else math.inf, run)


def tile_sizes(tokens: float, rows: float) -> list[float]:
    """Tokens of each tile; if there are many, three stand for all."""
    count = max(1, math.ceil(tokens / rows))
    if count == 1:
        return [tokens]
    size = math.ceil(tokens / count)
    full = int(tokens // size)
    rest = tokens - full * size
    return [float(size)] * min(full, 3) + ([rest] if rest else [])


def _forward(ops: Ops, weights: Weights, x: Tensor, sizes: list[float], run: Run) -> Tensor:
    out: Tensor | None = None
    with ops.tape.muted():
        for size in sizes:
            result = run(Tensor(None, size, x.itemsize), weights)
            if out is None:
                out = ops.new(result.numel / size * x.numel, result.itemsize)
            del result
    assert out is not None
    return out


def _kept(
    ops: Ops, weights: Weights, prefix: str, x: Tensor, sizes: list[float], run: Run, held: list[Tensor]
) -> Tensor:
    names = [
        name
        for name, parameter in weights.made.items()
        if parameter.trained and (name == prefix or name.startswith(f"{prefix}."))
    ]
    total, itemsize, needs_x = x.numel, x.itemsize, x.requires_grad

    def backward(_: Tensor) -> list[Tensor | None]:
        grad = held.pop()
        grad_x = ops.new(total, itemsize) if needs_x else None
        sums: dict[str, Tensor] = {}
        ops.tape.caches_casts = False
        for size in sizes:
            # The tile's own parameters, whose gradients are then summed.
            own = replace(weights, made={})
            entry = Parameter(size, itemsize, trained=needs_x)
            result = run(Tensor(None, size, itemsize, entry.node), own)
            ops.tape.backward(result, grad.view(result.numel))
            del result
            entry.grad = None
            for name in reversed(names):
                _add(ops, sums, name, own.made[name])
        ops.tape.caches_casts = True
        grads = [_cast(ops, sums.get(name), weights.made[name].itemsize) for name in names]
        return [grad_x, *grads]

    return ops.tape.record(ops.new(0, itemsize), [x, *(weights.made[name] for name in names)], [x], backward)


def _add(ops: Ops, sums: dict[str, Tensor], name: str, parameter: Parameter) -> None:
    """Add a tile's gradient; 16-bit gradients of more than one tile are summed in fp32."""
    grad, parameter.grad = parameter.grad, None
    if grad is None:
        return
    if name not in sums:
        sums[name] = grad
    elif sums[name].itemsize != FP32:
        sums[name] = ops.new(grad.numel, FP32)


def _cast(ops: Ops, grad: Tensor | None, itemsize: int) -> Tensor | None:
    return grad if grad is None or grad.itemsize == itemsize else ops.new(grad.numel, itemsize)
