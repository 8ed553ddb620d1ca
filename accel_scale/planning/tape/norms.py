"""transformers' norms on the tape."""

from __future__ import annotations

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.tape.families import Family
from accel_scale.planning.tape.linears import Weights
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tensors import Parameter, Tensor


def norm(
    ops: Ops, model: ModelFacts, family: Family, weights: Weights, name: str, x: Tensor, rows: float, width: float
) -> Tensor:
    """The model's norm over `rows` rows of `width` values."""
    if model.norm == "layer" and family.layer_norm == "bare":
        return ops.cast(ops.layer_norm(ops.cast(x, FP32), None, None, rows), x.itemsize)
    if model.norm == "layer" and family.layer_norm == "spelt":
        return spelt_layer_norm(ops, x, weights.base(name, width), rows)
    if model.norm == "layer":
        return ops.layer_norm(x, weights.base(name, width), weights.base(f"{name}.bias", width), rows)
    return rms_norm(ops, x, weights.base(name, width), rows, family.rms)


def rms_norm(ops: Ops, x: Tensor, weight: Parameter, rows: float, kind: str) -> Tensor:
    """RMSNorm in fp32; `kind` as in `Family`."""
    itemsize = x.itemsize
    if kind == "fused":
        return _fused_rms_norm(ops, x, weight, rows)
    normed = _normalised(ops, ops.cast(x, FP32), rows)
    if kind == "gemma":
        factor = ops.scale(ops.cast(Tensor(None, weight.numel, weight.itemsize, weight.node), FP32))
        return ops.cast(ops.mul(normed, factor), itemsize)
    if kind == "olmo":
        return ops.cast(ops.weighted(weight, normed), itemsize)
    return ops.weighted(weight, ops.cast(normed, itemsize))


def _fused_rms_norm(ops: Ops, x: Tensor, weight: Parameter, rows: float) -> Tensor:
    """Liger's RMSNorm: one kernel, which keeps its input and one value per row."""
    numel, itemsize = x.numel, x.itemsize

    def backward(grad: Tensor) -> list[Tensor | None]:
        return [ops.new(numel, itemsize), ops.new(weight.numel, weight.itemsize) if weight.trained else None]

    return ops.custom([x, weight], numel, itemsize, [x, ops.new(rows, FP32)], backward)


def spelt_layer_norm(ops: Ops, x: Tensor, weight: Parameter, rows: float) -> Tensor:
    """Cohere's layer norm: mean and variance in fp32, with the difference from the mean computed twice."""
    itemsize = x.itemsize
    x = ops.cast(x, FP32)
    mean = ops.mean(x, rows)
    variance = ops.square_mean(ops.less(x, mean), rows)
    x = ops.mul(ops.less(x, mean), ops.elementwise(ops.shift(variance), saves_input=False))
    factor = ops.cast(Tensor(None, weight.numel, weight.itemsize, weight.node), FP32)
    x = ops.mul(factor, x)
    return ops.cast(x, itemsize)


def _normalised(ops: Ops, x: Tensor, rows: float) -> Tensor:
    variance = ops.square_mean(x, rows)
    inverse = ops.elementwise(ops.shift(variance), saves_input=False)
    del variance
    return ops.mul(x, inverse)
