"""Temporary memory of sharding and communication: gathered weights, unsharded gradients, buckets."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.planning.cost.sharding import frozen_layer_bytes, small_params
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import ParameterGroups, parameter_groups
from accel_scale.planning.models.training_setup import TrainingSetup


@dataclass(frozen=True)
class Transfers:
    """Bytes besides states and activations, by moment.

    Attributes:
        gathered_bytes: Weights gathered from other ranks while layers run.
        first_gathered_bytes: The same while the first layer runs backward, with nothing left to fetch.
        bucket_bytes: Communication buffers while gradients are reduced.
        last_bucket_bytes: The same for the last gradients, the embedding's and the head's.
        step_bucket_bytes: The part of them still allocated while the optimizer steps.
        unreduced_bytes: Gradients at the end of the backward pass that are still whole.
        waiting_gradient_bytes: Gradients of earlier micro-batches, if they are not reduced before the last one.
        unreduced_share: Share of the sharded gradients that `unreduced_bytes` will become.
    """

    gathered_bytes: float = 0.0
    first_gathered_bytes: float = 0.0
    bucket_bytes: float = 0.0
    last_bucket_bytes: float = 0.0
    unreduced_bytes: float = 0.0
    unreduced_share: float = 0.0
    waiting_gradient_bytes: float = 0.0
    step_bucket_bytes: float = 0.0


def transfers(model: ModelFacts, setup: TrainingSetup, *, fills_buffers: bool = False) -> Transfers:
    """Temporary memory of a strategy's transfers.

    Args:
        model: As in `state_bytes`.
        fills_buffers: Whether a buffer takes memory only where it has been written to, as in a CPU's memory.
    """
    parallel = setup.parallel
    if parallel.kind.is_single or (parallel.num_gpus == 1 and not parallel.is_deepspeed):
        return Transfers()
    groups = parameter_groups(model, setup)
    if parallel.kind.is_ddp and not replicates_by_unit(setup):
        # Buckets hold a second copy of the gradients: gradient_as_bucket_view is off by default.
        bucket = float(groups.trainable * setup.trained_bytes)
        return Transfers(bucket_bytes=bucket, last_bucket_bytes=bucket, step_bucket_bytes=bucket)
    if parallel.is_deepspeed:
        return _deepspeed(model, setup, groups, fills_buffers=fills_buffers)
    return _fsdp(model, setup, groups)


def replicates_by_unit(setup: TrainingSetup) -> bool:
    """True if torch's `replicate`, which treats blocks as FSDP2 does, keeps the replicas instead of DDP."""
    return setup.parallel.kind.is_ddp and setup.parallel.is_divided


def _fsdp(model: ModelFacts, setup: TrainingSetup, groups: ParameterGroups) -> Transfers:
    """The units are the layers, and one more that holds embedding, final norm and head from forward to backward.

    The next layer is gathered while one runs; its gradients are copied for the reduce-scatter. As shown by
    `FSDPMemTracker` on torch 2.13.
    """
    width = setup.compute_bytes
    layer, outside = groups.largest_layer, groups.base - model.layer_params
    layer_bytes = frozen_layer_bytes(setup, layer) if setup.quantises_base else layer * width
    gathered, first = 2 * layer_bytes, layer_bytes
    is_pipeline = setup.parallel.pipeline_parallel > 1
    if not setup.parallel.reshard_after_forward or is_pipeline or replicates_by_unit(setup):
        # Layers are freed as their backward pass ends, so the first one runs with only its own weights gathered.
        gathered = model.num_layers * layer_bytes
    if is_pipeline:
        return _fsdp_pipeline(setup, groups, gathered + outside * width)
    whole = (outside if setup.trains_all else 0.0) * width
    # If ranks share the model, gradients are reduced in fp32, and so kept in it.
    kept = setup.trained_bytes if setup.parallel.is_divided else setup.reduce_bytes or width
    copied = setup.reduce_bytes or width
    return Transfers(
        gathered_bytes=gathered + outside * width,
        first_gathered_bytes=first + outside * width,
        bucket_bytes=layer * copied if setup.trains_all else 0.0,
        last_bucket_bytes=max(layer, outside) * copied if setup.trains_all else 0.0,
        unreduced_bytes=whole,
        unreduced_share=outside / groups.base if whole else 0.0,
        # Accelerate accumulates without synchronising unless told otherwise: gradients stay whole until the last
        # micro-batch.
        waiting_gradient_bytes=0.0 if setup.sync_each_batch else groups.with_gradients(setup) * kept,
    )


def _fsdp_pipeline(setup: TrainingSetup, groups: ParameterGroups, gathered: float) -> Transfers:
    """torch's stages gather their weights once, and reduce gradients once after a step's last backward pass."""
    unit = groups.largest_layer * setup.trained_bytes
    return Transfers(
        gathered_bytes=gathered,
        first_gathered_bytes=gathered,
        bucket_bytes=0.0,
        last_bucket_bytes=unit,
        unreduced_bytes=groups.trainable * setup.trained_bytes,
        unreduced_share=1.0,
        waiting_gradient_bytes=groups.trainable * setup.trained_bytes,
    )


def _deepspeed(model: ModelFacts, setup: TrainingSetup, groups: ParameterGroups, *, fills_buffers: bool) -> Transfers:
    """Gradients fill a buffer; its content is copied again to be reduced, in another dtype if one is requested.

    `ZeroBuffers` names the sources; tests/distributed/test_zero_buffers.py measures it.
    """
    zero, width = setup.parallel.zero.of_hidden_size(model.hidden_size), setup.compute_bytes
    reduced = setup.reduce_bytes or width
    filled = min(groups.trainable, zero.reduce_bucket)
    held = zero.reduce_bucket if zero.contiguous and not fills_buffers else filled
    copied = filled * (width if reduced == width else width + reduced)
    # A buffer that holds all gradients is reduced at the end; smaller ones are reduced from the last layer on.
    first_copied = copied if groups.trainable > zero.reduce_bucket else 0.0
    if not setup.parallel.shards_weights:
        held *= width * (2 if zero.overlap and zero.contiguous else 1)
        if setup.parallel.shards_gradients:
            return Transfers(bucket_bytes=held + first_copied, last_bucket_bytes=held + copied)
        # Gradients that stay whole are in the buffer if it holds all of them, else beside the rank's part of them.
        part = groups.trainable * width / setup.parallel.num_shards if first_copied else -filled * width
        return Transfers(bucket_bytes=held + first_copied, last_bucket_bytes=held + copied + part)
    held *= reduced
    per_param = 1 if setup.quantises_base else width
    # Blocks up to the bound on live parameters, prefetched ones twice (gathered ones are copied out of a buffer), and
    # what is not sharded at all; embedding and head are gathered whole, one at a time.
    small = small_params(model, groups, setup)
    split = model.layer_params - small
    ahead = min(split, zero.prefetch)
    live = min(split, zero.max_live, max(zero.max_reuse, groups.largest_layer) + ahead)
    gathered = (live + ahead) * per_param + (small + model.embedding_params) * width
    return Transfers(gathered, gathered, held + first_copied, held + copied, step_bucket_bytes=held)
