"""torch's scaled dot-product attention without a fused kernel, on the tape."""

from __future__ import annotations

from collections.abc import Callable

from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tensors import Tensor

Prepare = Callable[[Tensor], Tensor]


def spelt_attention(
    ops: Ops,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    num_scores: float,
    numel: float,
    prepare: tuple[Prepare, Prepare, Prepare],
) -> Tensor:
    """Single operations, all of them in fp32; `prepare` lays queries, keys and values out for batched products.

    Without a mask there is a causal one for all rows.
    """
    query, key, value = (ops.autocast(part) for part in inputs)
    itemsize = query.itemsize
    bias = mask
    if mask is not None and mask.itemsize != itemsize:
        bias = ops.new(mask.numel, itemsize)
    query, key, value = (ops.cast(part, FP32) for part in (query, key, value))
    query, key = ops.scale(query), ops.scale(key)
    keys = prepare[1](key)
    scores = ops.matmul(prepare[0](query), keys, num_scores, is_autocast=False)
    del keys
    if bias is not None and not ops.tape.adds_in_place:
        scores = ops.add(scores, bias)
    probabilities = ops.softmax(scores)
    del scores
    out = ops.matmul(probabilities, prepare[2](value), numel, is_autocast=False)
    out = ops.cast(out, itemsize)
    # Returned in the input's type beside the result, and dropped.
    returned = ops.cast(probabilities, itemsize)
    del returned, probabilities
    return ops.copy(out)
