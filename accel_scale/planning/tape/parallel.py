"""One rank's share of a model under tensor and sequence parallelism."""

from __future__ import annotations

import math
from dataclasses import replace

from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, ModelFacts
from accel_scale.planning.tape.ops import Ops
from accel_scale.planning.tape.tensors import Tensor

# Matrix products whose inputs are divided; all others have their outputs divided.
_ROWWISE = {"o_proj", "out_proj", "dense", "down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2"}
_WHOLE = {"gate", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa"}


def tensor_parallel_share(model: ModelFacts, degree: int) -> ModelFacts:
    """`model` with the heads, matrix products and vocabulary that one rank computes with.

    Hidden states and their norms stay whole. Division by columns, then by rows: Megatron-LM (Shoeybi et al. 2019),
    section 3. Key and value heads are repeated if there are fewer of them than ranks.
    """
    if degree == 1:
        return model
    kv_heads = max(1, model.num_kv_heads // degree)
    repeated = kv_heads * degree / model.num_kv_heads
    layers = tuple(_layer_share(layer, degree, repeated) for layer in model.layers)
    return replace(
        model,
        layers=layers,
        num_heads=math.ceil(model.num_heads / degree),
        num_kv_heads=kv_heads,
        vocab_size=math.ceil(model.vocab_size / degree),
    )


def _layer_share(layer: LayerFacts, degree: int, repeated: float) -> LayerFacts:
    attention = tuple(_linear_share(item, degree, repeated) for item in layer.attention)
    return replace(layer, attention=attention, mlp=tuple(_linear_share(item, degree, 1.0) for item in layer.mlp))


def _linear_share(item: LinearFacts, degree: int, repeated: float) -> LinearFacts:
    if item.name in _WHOLE:
        return item
    if item.name in _ROWWISE:
        return replace(item, in_features=math.ceil(item.in_features / degree))
    factor = repeated if item.name in ("k_proj", "v_proj") else 1.0
    return replace(item, out_features=math.ceil(item.out_features * factor / degree))


def gathered(ops: Ops, x: Tensor, ranks: float) -> Tensor:
    """The tokens of `ranks` ranks, for a product that divides its heads or columns; 1 / ranks: one rank's of them."""
    return x if ranks == 1 else exchanged(ops, x, x.numel * ranks)


def exchanged(ops: Ops, x: Tensor, numel: float) -> Tensor:
    """`x` after a collective that leaves `numel` values, in new memory forward and backward."""
    source, itemsize = x.numel, x.itemsize
    return ops.custom([x], numel, itemsize, [], lambda grad: [ops.new(source, itemsize)])
