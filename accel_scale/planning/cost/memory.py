"""Peak memory of one rank: phases of a training step, each a sum of named terms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from accel_scale.planning.cost.generation import generation_bytes
from accel_scale.planning.cost.overheads import beside_tensors, gpu_overhead, hoarded_share
from accel_scale.planning.cost.rank_share import RankShare, rank_shares
from accel_scale.planning.cost.sharding import StateBytes, state_bytes
from accel_scale.planning.cost.transfers import Transfers, replicates_by_unit, transfers
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.tape.activations import StepBytes
from accel_scale.planning.traced.forward import forward_bytes
from accel_scale.planning.traced.steps import step_bytes

_LOSS_PHASE = "forward and loss"
# Terms of a phase whose size follows from the settings alone.
_STATES = frozenset((
    "weights", "master weights", "optimizer states", "gradients", "update", "pipeline buffers", "key-value cache",
    "vLLM's share", "rest of the base, before it is sharded",
))  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """One moment of a step, and the bytes on the card at that moment, by name."""

    name: str
    terms: tuple[tuple[str, float], ...]

    @property
    def total_bytes(self) -> float:
        """The sum of the terms."""
        return sum(value for _, value in self.terms)


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted memory of one rank.

    Attributes:
        phases: Load, forward and loss, backward, optimizer step.
        states: Weights, gradients and optimizer states, on the card and on the host.
        step: Memory peaks of the activations.
        reserved_bytes: Memory held by torch's allocator at the peak: allocated, lost between blocks, or hoarded.
        hoarded_bytes: Of these, blocks kept from rows of other lengths. The allocator gives them back when the card
            is full, so they never decide whether a setting fits.
        device_bytes: Memory that the card shows as used: reserved, the CUDA context and NCCL's buffers.
        host_bytes: Host memory of one rank at the peak of loading or training.
        low_bytes: Lower end of the interval around `device_bytes`.
        high_bytes: Upper end, which decides whether a setting fits.
    """

    phases: tuple[Phase, ...]
    states: StateBytes
    step: StepBytes
    reserved_bytes: float
    hoarded_bytes: float
    device_bytes: float
    host_bytes: float
    low_bytes: float
    high_bytes: float

    @property
    def peak_phase(self) -> Phase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> float:
        """Bytes in tensors at the peak, as ``torch.cuda.max_memory_allocated`` reports them."""
        return self.peak_phase.total_bytes

    def as_dict(self) -> dict[str, Any]:
        """The estimate as a dictionary for JSON."""
        return {
            "allocated_bytes": round(self.peak_bytes),
            "reserved_bytes": round(self.reserved_bytes),
            "hoarded_bytes": round(self.hoarded_bytes),
            "device_bytes": round(self.device_bytes),
            "low_bytes": round(self.low_bytes),
            "high_bytes": round(self.high_bytes),
            "host_bytes": round(self.host_bytes),
            "peak_phase": self.peak_phase.name,
            "phases": {p.name: {name: round(value) for name, value in p.terms} for p in self.phases},
        }


def predict_memory(
    model: ModelFacts,
    setup: TrainingSetup,
    *,
    is_cuda: bool = True,
    is_tracked: bool = False,
    limit_bytes: float | None = None,
) -> MemoryEstimate:
    """Peak memory of the rank that needs the most.

    Args:
        model: Shapes of the model.
        setup: How it is trained.
        is_cuda: Whether the kernels are CUDA's.
        is_tracked: Whether a memory tracker is active (see `step_bytes`).
        limit_bytes: Memory of the card, which bounds what the allocator hoards; None: the card is large enough.

    Raises:
        ConfigError: for a model, optimizer or policy that is not modelled.
    """
    shares = rank_shares(model, setup)
    estimates = [_of_rank(share, setup, is_cuda, is_tracked, limit_bytes) for share in shares]
    fullest = max(estimates, key=lambda estimate: estimate.high_bytes)
    if not setup.parallel.is_divided:
        return fullest
    # One of the ranks that share a model builds all of it in host memory before it is split.
    return replace(fullest, host_bytes=max(fullest.host_bytes, model.num_params * setup.trained_bytes))


def _of_rank(
    share: RankShare, setup: TrainingSetup, is_cuda: bool, is_tracked: bool, limit_bytes: float | None
) -> MemoryEstimate:
    seen = forward_setup(setup)
    states = state_bytes(share.facts, setup)
    step = step_bytes(share.facts, seen, is_cuda=is_cuda, is_tracked=is_tracked)
    step = step.with_waiting(share.waiting * step.saved_bytes)
    # Buffers for every micro-batch, as torch's `PipelineStage` allocates them once for all steps.
    hidden = setup.micro_batch_size * setup.sequence_length * share.facts.hidden_size * seen.trained_bytes
    ranks = setup.parallel.sequence_parallel * setup.parallel.stream_ranks
    buffers = share.num_received * setup.accumulation * hidden / ranks
    moved = transfers(share.facts, setup, fills_buffers=not (is_cuda or is_tracked))
    phases = _phases(setup, states, step, moved, buffers) + _passes_beside(
        share.facts, setup, states, step, is_cuda=is_cuda
    )
    phases = tuple(_beside_vllm(phase, setup) for phase in phases)
    fullest = max(phases, key=lambda phase: phase.total_bytes)
    beside = beside_tensors(
        peak=fullest.total_bytes,
        states=sum(value for name, value in fullest.terms if name in _STATES),
        with_loss=next(phase for phase in phases if phase.name == _LOSS_PHASE).total_bytes,
        gradients=states.gradient_bytes,
        step=step,
        overhead=gpu_overhead(setup, is_cuda=is_cuda),
        share=hoarded_share(setup, share.facts.vocab_size, is_cuda=is_cuda),
        limit_bytes=limit_bytes,
    )
    inputs, stays = _offloaded_bytes(share.facts, seen, is_cuda=is_cuda), setup.parallel.offloads
    host = max(states.host_bytes, inputs + states.host_bytes * stays)
    return MemoryEstimate(phases, states, step, host_bytes=host, **beside)


def _offloaded_bytes(model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool) -> float:
    """Layer inputs in host memory with offload checkpointing; torch rounds pinned blocks up to powers of two."""
    if setup.checkpointing != "offload":
        return 0.0
    ranks = setup.parallel.sequence_parallel * setup.parallel.stream_ranks
    rows = setup.micro_batch_size * setup.sequence_length / ranks
    itemsize = setup.trained_bytes if setup.trains_all else setup.frozen_bytes
    size = rows * model.hidden_size * itemsize
    return model.num_layers * (2.0 ** math.ceil(math.log2(size)) if is_cuda else size)


def forward_setup(setup: TrainingSetup) -> TrainingSetup:
    """`setup` as the layers see it: settings that do not change their tensors are dropped, so that walks are shared.

    Under mixed precision, FSDP and DeepSpeed give the layers 16-bit weights, and autocast has nothing to cast.
    """
    parallel = setup.parallel
    seen = ParallelSetup(
        num_gpus=parallel.sequence_parallel,
        sequence_parallel=parallel.sequence_parallel,
        stream_ranks=parallel.stream_ranks,
    )
    seen_setup = replace(
        setup, parallel=seen, optimizer="adamw_torch_fused", accumulation=1, sync_each_batch=False,
        reference_model=False, reference_pass="none",
    )  # fmt: skip
    if setup.autocast and _casts_weights(setup):
        return replace(seen_setup, precision="bf16_true", weight_dtype=None)
    return seen_setup


def _casts_weights(setup: TrainingSetup) -> bool:
    parallel = setup.parallel
    return parallel.is_deepspeed or parallel.kind.is_fsdp or replicates_by_unit(setup)


def _phases(
    setup: TrainingSetup, states: StateBytes, step: StepBytes, moved: Transfers, pipeline_buffers: float
) -> tuple[Phase, ...]:
    """The moments at which memory can be highest."""
    resident: tuple[tuple[str, float], ...] = (
        ("weights", states.weight_bytes),
        ("master weights", states.master_bytes),
        ("optimizer states", states.optimizer_bytes),
    )
    if pipeline_buffers:
        resident = (*resident, ("pipeline buffers", pipeline_buffers))
    kept = states.gradient_bytes
    # ZeRO-3 has one buffer for its part of the gradients from the start.
    has_earlier = setup.accumulation > 1 or setup.parallel.kind.partitions_weights
    from_earlier = max(kept, moved.waiting_gradient_bytes) if has_earlier else 0.0
    if setup.parallel.pipeline_schedule == "gpipe":
        # The first gradients appear when the first micro-batch has been freed.
        from_earlier = max(0.0, from_earlier - step.saved_bytes / setup.accumulation)
    # In a pipeline they appear between passes of other micro-batches: torchtitan's runs with one reserved 6 to 24 %
    # more than is planned, so they count as uncertain there.
    waits_whole = setup.parallel.pipeline_parallel > 1 and moved.waiting_gradient_bytes > kept
    earlier = ("unreduced gradients" if waits_whole else "gradients", from_earlier)
    gathered, buckets = ("gathered weights", moved.gathered_bytes), ("communication buckets", moved.bucket_bytes)
    passed = ("activations and loss", max(step.forward_bytes, step.loss_bytes))
    forward = Phase(_LOSS_PHASE, (*resident, earlier, passed, gathered))
    # The walk's gradients are whole; at the last layer, they are that layer's and the head's.
    last = ("activations and loss", step.backward_top_bytes)
    top = Phase("backward, last layer", (*resident, earlier, last, gathered, buckets))
    bottom = Phase(
        "backward, first layer",
        (
            *resident,
            # While all are still whole, no shard of them exists.
            (
                "gradients",
                kept * max(float(from_earlier > 0 and moved.unreduced_share < 1), 1 - moved.unreduced_share),
            ),
            ("unreduced gradients", moved.unreduced_bytes),
            ("activations and loss", max(0.0, step.backward_bottom_bytes - step.gradient_bytes)),
            ("gathered weights", moved.first_gathered_bytes),
            ("communication buckets", moved.last_bucket_bytes),
        ),
    )
    update = Phase(
        "optimizer step",
        (
            *resident,
            ("gradients", kept),
            ("update", states.update_bytes),
            # DDP's and ZeRO-3's buckets stay allocated.
            ("communication buckets", moved.step_bucket_bytes),
        ),
    )
    load = Phase(
        "load", (("weights", states.weight_bytes), ("rest of the base, before it is sharded", states.load_extra_bytes))
    )
    return load, forward, top, bottom, update


def _passes_beside(
    model: ModelFacts, setup: TrainingSetup, states: StateBytes, step: StepBytes, *, is_cuda: bool
) -> tuple[Phase, ...]:
    """The moments of passes without gradients: a reference's while the graph is kept, and generation before it."""
    resident = (
        ("weights", states.weight_bytes),
        ("master weights", states.master_bytes),
        ("optimizer states", states.optimizer_bytes),
    )
    moved, phases = transfers(model, setup), []
    gathered = ("gathered weights", moved.gathered_bytes)
    if setup.reference_pass == "within":
        seen = forward_setup(setup)
        passed = forward_bytes(model, seen, is_cuda=is_cuda, adapters=False).peak_bytes
        kept = max(states.gradient_bytes, moved.waiting_gradient_bytes) if setup.accumulation > 1 else 0.0
        waiting = (("gradients", kept), ("activations and loss", step.saved_bytes), ("reference's pass", passed))
        phases.append(Phase("reference", (*resident, *waiting, gathered)))
    if setup.generation is not None and setup.vllm is not None:
        # TRL passes on one parameter at a time, but adapters are merged into all of them at once.
        whole = model.num_params * setup.compute_bytes - states.weight_bytes
        largest = model.vocab_size * model.hidden_size * setup.trained_bytes
        handed = max(0.0, whole) if setup.trains_adapters else largest
        gathered = ("gathered weights", handed if setup.parallel.kind.partitions_weights else 0.0)
        phases.append(Phase("generation", (*resident, gathered)))
    elif setup.generation is not None:
        found = generation_bytes(model, _generation_setup(setup), is_cuda=is_cuda)
        if setup.parallel.kind.partitions_weights:
            # TRL keeps all weights gathered while it generates.
            whole = model.num_params * setup.compute_bytes - states.weight_bytes
            gathered = ("gathered weights", max(0.0, whole))
        parts = (("key-value cache", found.cache_bytes), ("generation's pass", found.pass_bytes))
        phases.append(Phase("generation", (*resident, *parts, gathered)))
    return tuple(phases)


def _beside_vllm(phase: Phase, setup: TrainingSetup) -> Phase:
    """`phase` with vLLM's memory at that moment: it starts after the load, and may sleep except while generating."""
    if setup.vllm is None or phase.name == "load" or (setup.vllm.sleeps and phase.name != "generation"):
        return phase
    return replace(phase, terms=(*phase.terms, ("vLLM's share", setup.vllm.held_bytes)))


def _generation_setup(setup: TrainingSetup) -> TrainingSetup:
    """`setup` as `generate` sees it: with adapters, it calls a model inside the one that Accelerate autocasts."""
    seen = forward_setup(setup)
    if not (seen.autocast and seen.trains_adapters):
        return seen
    weights = {2: "bfloat16", 4: "float32"}
    return replace(
        seen, precision="bf16_true", weight_dtype=weights[seen.trained_bytes], frozen_dtype=weights[seen.frozen_bytes]
    )
