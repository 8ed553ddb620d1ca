"""Bytes that a micro-batch moves besides matrix products: a layer's elementwise kernels, the loss, and weights."""

from __future__ import annotations

from accel_scale.planning.cost.flops import adapted_linears, recomputed_fraction, trained_params
from accel_scale.planning.models.model_facts import LayerFacts, ModelFacts
from accel_scale.planning.models.parameters import quantised_weights
from accel_scale.planning.models.training_setup import TrainingSetup

# Reading 4 bits and constants, writing 16-bit weights, reading them again in the product, in bytes per weight.
NF4_DEQUANTISE_BYTES = 4.6

# What kernels read and write in one forward pass, in bytes per value, for 16-bit values. transformers' RMS norm is six
# kernels in fp32. Layer norm is one, which autocast runs in fp32, between casts.
_RMS_NORM_BYTES = 36.0
_LAYER_NORM_BYTES = 4.0
_AUTOCAST_LAYER_NORM_BYTES = 20.0
_RESIDUAL_BYTES = 6.0
# Negating one half, joining, two products and a sum, for queries and keys.
_ROTARY_BYTES = 20.0
# Attention's result is copied from heads back to rows.
_HEADS_BYTES = 4.0
_ACTIVATION_BYTES = 4.0
# Eight kernels in transformers' class.
_WRITTEN_OUT_ACTIVATION_BYTES = 36.0
_WRITTEN_OUT_ACTIVATIONS = ("gelu_new",)
_GATE_BYTES = 6.0
# torch.compile runs each of these as one kernel; a residual is added in the kernel of the next norm.
_COMPILED_NORM_BYTES = 8.0
_COMPILED_ROTARY_BYTES = 4.0
_COMPILED_ACTIVATION_BYTES = 4.0
_COMPILED_GATED_BYTES = 6.0
# Dropout, scale, sum and casts of an adapted matrix, per unit of its inputs and outputs.
_ADAPTER_BYTES = 6.0
# Logits and loss, whole step, per token and vocabulary entry.
_LOSS_BYTES = 20.0
# Per score that eager attention writes and reads in one forward pass.
_EAGER_ATTENTION_BYTES = 20.0


def layer_traffic(facts: ModelFacts, layer: LayerFacts, setup: TrainingSetup) -> float:
    """Bytes per token that a layer's elementwise kernels read and write in one forward pass, without adapters."""
    rotated = facts.rotary_dims * (facts.num_heads + facts.num_kv_heads) * layer.rotates
    if setup.compile:
        activation = _COMPILED_GATED_BYTES if facts.gated_mlp else _COMPILED_ACTIVATION_BYTES
        return (
            _COMPILED_NORM_BYTES * layer.num_norms * facts.hidden_size
            + _COMPILED_ROTARY_BYTES * rotated
            + activation * _active_width(facts, layer)
        )
    norm = _RMS_NORM_BYTES
    if facts.norm == "layer":
        norm = _AUTOCAST_LAYER_NORM_BYTES if setup.autocast else _LAYER_NORM_BYTES
    written_out = facts.activation in _WRITTEN_OUT_ACTIVATIONS
    activation = _WRITTEN_OUT_ACTIVATION_BYTES if written_out else _ACTIVATION_BYTES
    return (
        (norm * layer.num_norms + 2 * _RESIDUAL_BYTES) * facts.hidden_size
        + _ROTARY_BYTES * rotated
        + _HEADS_BYTES * facts.num_heads * facts.head_dim
        + (activation + _GATE_BYTES * facts.gated_mlp) * _active_width(facts, layer)
    )


def step_traffic_per_token(facts: ModelFacts, setup: TrainingSetup, factor: float) -> float:
    """Bytes per token of forward, backward and recomputation, and of the loss.

    Args:
        factor: Ratio of what uncompiled layers move to the count of `layer_traffic`.
    """
    forward = 0.0
    for layer in facts.layers:
        adapted = adapted_linears(layer, setup)
        features = sum(linear.active_copies * (linear.in_features + linear.out_features) for linear in adapted)
        counted = layer_traffic(facts, layer, setup) * (1.0 if setup.compile else factor)
        forward += layer.count * (counted + _ADAPTER_BYTES * features)
        if setup.attention == "eager":
            forward += layer.count * _EAGER_ATTENTION_BYTES * facts.num_heads * setup.sequence_length
    # Norms and activations run again whenever anything is recomputed, whether matrix products are kept or not.
    recomputed = 1.0 if setup.checkpointing == "selective" else recomputed_fraction(setup.checkpointing)
    loss = _LOSS_BYTES * facts.head_width * (0.5 if setup.loss == "liger" else 1.0)
    return (forward * (3 + recomputed) + loss) * setup.compute_bytes / 2


def weight_traffic(facts: ModelFacts, setup: TrainingSetup) -> float:
    """Bytes per micro-batch independent of tokens: weights read by every pass, gradients added, casts, NF4."""
    passes = 3 if setup.trains_all else 2
    passes_with_recompute = passes + recomputed_fraction(setup.checkpointing)
    traffic = facts.num_params * setup.compute_bytes * passes_with_recompute
    trained = trained_params(facts, setup)
    traffic += 3 * setup.trained_bytes * trained
    if setup.autocast and not setup.parallel.shards_weights:
        traffic += (setup.trained_bytes + setup.compute_bytes) * trained
    if setup.quantises_base:
        traffic += NF4_DEQUANTISE_BYTES * quantised_weights(facts) * (2 + recomputed_fraction(setup.checkpointing))
    return traffic


def _active_width(facts: ModelFacts, layer: LayerFacts) -> int:
    """Intermediate units a token passes through."""
    mixture = layer.mixture
    if mixture is None:
        return facts.intermediate_size
    return mixture.experts_per_token * mixture.expert_intermediate_size + mixture.shared_intermediate_size
