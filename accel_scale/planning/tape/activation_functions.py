"""Activation functions made of several operations, on the tape."""

from __future__ import annotations

from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tensors import Tensor

# Activation functions that transformers writes out in torch operations.
WRITTEN_OUT = ("gelu_new", "gelu_fast")


def written_out_gelu(ops: Ops, x: Tensor) -> Tensor:
    """``0.5 * x * (1 + tanh(c * (x + 0.044715 * x³)))`` in single operations."""
    half = ops.scale(x)
    # CUDA's autocast takes powers in fp32, and what follows stays there.
    is_wide = ops.tape.is_cuda and ops.tape.autocast_bytes is not None
    source = ops.cast(x, FP32) if is_wide else x
    # Nothing in between has a name.
    return ops.mul(
        half,
        ops.shift(
            ops.elementwise(
                ops.scale(ops.add(x, ops.scale(ops.elementwise(source, temporaries=2)))), saves_input=False
            )
        ),
    )


def bloom_gelu(ops: Ops, x: Tensor) -> Tensor:
    """BLOOM's: one autograd function that saves its input; at most four values live at a time, five backward."""
    numel, itemsize = x.numel, x.itemsize
    temporaries = [ops.new(numel, itemsize) for _ in range(4)]
    del temporaries

    def backward(grad: Tensor) -> list[Tensor | None]:
        temporaries = [ops.new(numel, itemsize) for _ in range(5)]
        del temporaries
        tanh_and_factor = [ops.new(numel, itemsize) for _ in range(2)]
        result = ops.new(numel, itemsize)
        del tanh_and_factor
        return [result]

    return ops.custom([x], numel, itemsize, [x], backward)
