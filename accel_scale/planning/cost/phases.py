"""The moments of a training step at which memory can be highest, each a sum of named terms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_scale.planning.cost.generation import generation_bytes
from accel_scale.planning.cost.sharding import StateBytes
from accel_scale.planning.cost.transfers import Transfers, replicates_by_unit, transfers
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.tape.marks import StepBytes
from accel_scale.planning.traced.forward import forward_bytes

FORWARD, LAST_LAYER, FIRST_LAYER, UPDATE = (
    "forward and loss", "backward, last layer", "backward, first layer", "optimizer step",
)  # fmt: skip
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

    @property
    def state_bytes(self) -> float:
        """Of these, bytes whose size follows from the settings alone."""
        return sum(value for name, value in self.terms if name in _STATES)


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


def step_phases(
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
    # In a pipeline they appear between passes of other micro-batches, so they count as uncertain there.
    waits_whole = setup.parallel.pipeline_parallel > 1 and moved.waiting_gradient_bytes > kept
    earlier = ("unreduced gradients" if waits_whole else "gradients", from_earlier)
    gathered, buckets = ("gathered weights", moved.gathered_bytes), ("communication buckets", moved.bucket_bytes)
    passed = ("activations and loss", max(step.forward_bytes, step.loss_bytes))
    forward = Phase(FORWARD, (*resident, earlier, passed, gathered))
    # The walk's gradients are whole; at the last layer, they are that layer's and the head's.
    last = ("activations and loss", step.backward_top_bytes)
    top = Phase(LAST_LAYER, (*resident, earlier, last, gathered, buckets))
    bottom = Phase(
        FIRST_LAYER,
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
        UPDATE,
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


def passes_beside(
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


def beside_vllm(phase: Phase, setup: TrainingSetup) -> Phase:
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
