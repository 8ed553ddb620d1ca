"""Weights, gradients and optimizer states of one rank for every strategy, on the card and on the host."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.facts.optimizer_specs import OptimizerSpec, modelled_optimizer
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import ParameterGroups, parameter_groups
from accel_scale.planning.models.training_setup import TrainingSetup

# NF4: 4 bits, and per block of 64 an fp32 maximum, or an 8-bit one with an fp32 maximum per 256 of those
# (QLoRA, Dettmers et al. 2023, section 3).
NF4_BYTES = 0.5 + 4 / 64
NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class StateBytes:
    """Memory that one rank holds from step to step.

    Attributes:
        weight_bytes: Weights on the card.
        master_bytes: DeepSpeed's fp32 copies on the card.
        gradient_bytes: Gradients on the card after the backward pass.
        optimizer_bytes: Optimizer states on the card.
        update_bytes: Temporary memory of the optimizer step.
        load_extra_bytes: Memory that loading needs besides the weights.
        host_bytes: The same kinds in host memory, and the copy made by loading.
    """

    weight_bytes: float
    master_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    update_bytes: float
    load_extra_bytes: float
    host_bytes: float


def state_bytes(model: ModelFacts, setup: TrainingSetup) -> StateBytes:
    """Bytes of weights, gradients and optimizer states of a rank.

    Args:
        model: What the rank's data-parallel group holds; under tensor and pipeline parallelism, its `rank_share`.
    """
    groups, optimizer = parameter_groups(model, setup), modelled_optimizer(setup.optimizer)
    if setup.parallel.is_deepspeed:
        return _deepspeed(model, setup, groups, optimizer)
    return _torch(model, setup, groups, optimizer)


def frozen_weight_bytes(setup: TrainingSetup, groups: ParameterGroups) -> float:
    """Bytes of all frozen weights."""
    nf4 = NF4_DOUBLE_BYTES if setup.double_quantisation else NF4_BYTES
    return groups.quantised * nf4 + (groups.frozen - groups.quantised) * setup.frozen_bytes


def _torch(model: ModelFacts, setup: TrainingSetup, groups: ParameterGroups, optimizer: OptimizerSpec) -> StateBytes:
    parallel = setup.parallel
    shards = parallel.num_shards if parallel.shards_weights else 1
    trained, width = groups.trainable / shards, setup.trained_bytes
    frozen = frozen_weight_bytes(setup, groups) / shards
    weights = trained * width * _copies(setup) + frozen
    gradients = groups.with_gradients(setup) / shards * width
    weights += _buffers(model, setup) * _copies(setup)
    if setup.steps_in_backward:
        # One parameter's gradient at a time, the largest of which is the embedding's.
        gradients = min(trained, model.embedding_params) * width
    states = trained * optimizer.state_bytes(width)
    if setup.trains_all and optimizer.widens_embeddings:
        narrow = optimizer.state_bytes(width)
        states += (groups.embedding + groups.positions) * (4 * (optimizer.num_states or 0) - narrow) / shards
    stepped = gradients / width if setup.steps_in_backward else trained
    update = stepped * width * optimizer.transient_copies
    host, whole = _load_bytes(setup, groups), _whole_on_card(setup, groups)
    if parallel.offloads_params:
        # FSDP's offload keeps weights, gradients and states on the host, where the optimizer steps.
        return StateBytes(0, 0, 0, 0, 0, whole, max(host, weights + gradients + states + update))
    extra = max(0.0, whole - weights)
    if optimizer.on_host:
        return StateBytes(weights, 0, gradients, 0, 0, extra, max(host, states + 2 * gradients))
    return StateBytes(weights, 0, gradients, states, update, extra, host)


def _buffers(model: ModelFacts, setup: TrainingSetup) -> float:
    """Bytes of the buffers besides the parameters."""
    return model.buffer_bytes + model.buffer_values * (setup.trained_bytes if setup.trains_all else setup.frozen_bytes)


def _copies(setup: TrainingSetup) -> int:
    """Number of models on a rank: TRL shards a reference model like the trained one, in the same dtype."""
    return 2 if setup.reference_model else 1


def _whole_on_card(setup: TrainingSetup, groups: ParameterGroups) -> float:
    """Bytes of the base that every card holds while loading, before sharding; 0 if the base is loaded in shards.

    transformers quantises on the card and does not shard what it quantises (5.23: `is_quantized` excludes zero.Init
    and loading on one rank; accelerate 1.15 `fsdp2_prepare_model` shards such a model where it is).
    """
    if not (setup.quantises_base and setup.quantises_whole and setup.parallel.shards_weights):
        return 0.0
    return frozen_weight_bytes(setup, groups)


def _deepspeed(
    model: ModelFacts, setup: TrainingSetup, groups: ParameterGroups, optimizer: OptimizerSpec
) -> StateBytes:
    """ZeRO keeps 16-bit weights and gradients, fp32 masters and states (Rajbhandari et al. 2020, section 3)."""
    parallel, sub_group = setup.parallel, setup.parallel.zero.sub_group
    shards, width = parallel.num_shards, setup.compute_bytes
    weight_shards = shards if parallel.shards_weights else 1
    gradient_shards = shards if parallel.shards_gradients else 1
    trained = groups.trainable
    weights = (trained * width * _copies(setup) + frozen_weight_bytes(setup, groups)) / weight_shards
    weights += _buffers(model, setup) * _copies(setup)
    masters = trained * 4 / shards if width < 4 else 0.0
    gradients = trained * width / gradient_shards
    # The optimizer steps on an fp32 copy of its part of the gradients, made from one flat copy in their own dtype;
    # under ZeRO-3, one sub-group at a time.
    part = trained / shards
    update = (4 + width) * (min(part, sub_group) if parallel.shards_weights else part) if width < 4 else 0.0
    states = part * optimizer.state_bytes(4)
    host, whole = _load_bytes(setup, groups), _whole_on_card(setup, groups)
    if parallel.offloads_optimizer:
        pinned = part * (4 + 4) + states
        host = max(host, pinned if parallel.offload_optimizer == "cpu" else 3 * 12 * min(part, sub_group))
        masters, states, update = 0.0, 0.0, 0.0
        gradients = 0.0 if parallel.shards_gradients else gradients
    if parallel.offloads_params:
        host += weights if parallel.offload_params == "cpu" else 0.0
        weights = 0.0
    return StateBytes(weights, masters, gradients, states, update, max(0.0, whole - weights), host)


def small_params(model: ModelFacts, groups: ParameterGroups, setup: TrainingSetup) -> float:
    """Parameters that ZeRO-3 keeps whole on every rank because their tensors are small: norms, small matrices."""
    limit = setup.parallel.zero.of_hidden_size(model.hidden_size).persistence
    matrices = sum(
        layer.count * linear.num_params
        for layer in model.layers
        for linear in layer.linears
        if linear.copies * linear.in_features * linear.out_features <= limit
    )
    if setup.quantises_base:
        matrices = 0
    return matrices + (groups.layer_norms + groups.final_norm if model.hidden_size <= limit else 0)


def _load_bytes(setup: TrainingSetup, groups: ParameterGroups) -> float:
    """Host memory of one rank while loading: safetensors are mapped, so a copy exists only if weights are cast."""
    width = setup.trained_bytes if setup.trains_all else setup.frozen_bytes
    whole = groups.base * width
    if setup.quantises_base:
        # Weights are quantised on the card as they are read, one checkpoint shard (5 GB by default) at a time.
        return min(whole, 5e9)
    if setup.parallel.kind.is_fsdp:
        # Rank 0 loads the model and broadcasts it; the others have it on the meta device.
        return whole
    return whole / setup.parallel.num_shards if setup.parallel.shards_weights else whole


def frozen_layer_bytes(setup: TrainingSetup, layer_params: float) -> float:
    """Bytes of a layer that is stored in 4 bits."""
    return layer_params * (NF4_DOUBLE_BYTES if setup.double_quantisation else NF4_BYTES)
