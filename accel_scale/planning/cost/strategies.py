"""Ways to distribute a run over GPUs, from the simplest to the last resort, and combinations that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accel_scale.facts.checkpointing import NOT_REENTRANT, SEGMENTS, kind_of
from accel_scale.facts.optimizer_specs import modelled_optimizer
from accel_scale.facts.strategies import HYBRID, ONE_GPU, VARIANTS
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.tape.families import changes_products, tiles_conflict
from accel_scale.planning.traced.steps import division_conflict


@dataclass(frozen=True)
class ParallelChoice:
    """One way to distribute a run.

    Attributes:
        label: Name in tables.
        parallel: Its settings.
        effort: Rank among equals: the simpler, the lower.
        is_open: Whether it is considered when no strategy is named.
    """

    label: str
    parallel: ParallelSetup
    effort: int
    is_open: bool = True


def choices(num_gpus: int, gpus_per_node: int) -> Iterator[ParallelChoice]:
    """Every strategy for `num_gpus` GPUs."""
    if num_gpus == 1:
        yield ParallelChoice(ONE_GPU, ParallelSetup(gpus_per_node=gpus_per_node), 0)
    for effort, variant in enumerate(VARIANTS, start=1):
        if num_gpus == 1 and not variant.for_one_gpu:
            continue
        parallel = ParallelSetup(
            variant.strategy,
            num_gpus,
            gpus_per_node,
            reshard_after_forward=variant.reshard_after_forward,
            offload_optimizer=variant.offload_optimizer,
            offload_params=variant.offload_params,
            zero=variant.zero,
        )
        yield ParallelChoice(variant.label, parallel, effort, variant.is_open)
    num_nodes = num_gpus // gpus_per_node
    if num_nodes > 1 and num_gpus % gpus_per_node == 0 and gpus_per_node > 1:
        parallel = ParallelSetup("fsdp2", num_gpus, gpus_per_node, num_replicas=num_nodes)
        yield ParallelChoice(HYBRID, parallel, 5)


def conflict(setup: TrainingSetup, model: ModelFacts | None = None) -> str | None:
    """Why the libraries cannot run this combination; None if they can."""
    if model is not None and (reason := division_conflict(model, setup)):
        return reason
    if model is not None and setup.checkpointing == "selective" and changes_products(model):
        return "the model changes results in place that selective checkpointing keeps"
    if model is not None and (reason := tiles_conflict(model, setup)):
        return reason
    parallel, optimizer = setup.parallel, setup.optimizer
    if kind_of(setup.checkpointing) == SEGMENTS and (parallel.kind.shards_weights or parallel.pipeline_parallel > 1):
        return "layers that are gathered or staged one by one are not recomputed in segments"
    if setup.long_rows and (parallel.tensor_parallel > 1 or parallel.pipeline_schedule == "zero_bubble"):
        return "MLPs are not computed in tiles under tensor parallelism or the schedule zero_bubble"
    if setup.sync_each_batch and not parallel.can_sync_each_batch:
        return "gradients of every micro-batch are reduced under FSDP2 only, where ranks do not share the model"
    if setup.precision in parallel.kind.refused_precisions:
        return f"{parallel.kind.engine_label} does not run {setup.precision}"
    facts, offloads = modelled_optimizer(optimizer), parallel.offloads_optimizer
    zero_offload = parallel.is_deepspeed and offloads
    if zero_offload and facts.zero_offload is None:
        return f"ZeRO with optimizer offload would step by DeepSpeed CPU Adam in place of {optimizer}"
    # Parameters that FSDP keeps in host memory are updated there; all others on the card.
    device_type = "cpu" if parallel.offloads_params else "cuda"
    refusal = facts.refusal(
        device_type=device_type, strategy=parallel.strategy, zero_offload=zero_offload, precision=setup.precision
    )
    if refusal is not None:
        return f"{optimizer} does not work there: {refusal[1].reason}"
    if setup.needs_reentrant and kind_of(setup.checkpointing) in NOT_REENTRANT:
        return f"ZeRO-3 with adapters cannot recompute under {setup.checkpointing} checkpointing"
    return None
