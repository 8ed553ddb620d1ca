"""Peak memory of one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from accel_scale.planning.cost.overheads import (
    ALLOCATOR_MARGIN,
    TensorBytes,
    beside_tensors,
    gpu_overhead,
    hoarded_share,
    takes_whole_logits,
)
from accel_scale.planning.cost.phases import (
    FIRST_LAYER,
    FORWARD,
    LAST_LAYER,
    UPDATE,
    Phase,
    beside_vllm,
    forward_setup,
    passes_beside,
    step_phases,
)
from accel_scale.planning.cost.rank_share import RankShare, rank_shares
from accel_scale.planning.cost.sharding import StateBytes, state_bytes
from accel_scale.planning.cost.transfers import transfers
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.marks import StepBytes
from accel_scale.planning.traced.steps import step_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted memory of one rank.

    Attributes:
        phases: Load, forward and loss, backward, optimizer step.
        states: Weights, gradients and optimizer states, on the card and on the host.
        step: Memory peaks of the activations.
        reserved_bytes: Memory held by torch's allocator at the peak: allocated, lost between blocks, or hoarded.
        hoarded_bytes: Of these, blocks that later tensors do not fit, kept from other phases of a step and from rows
            of other lengths. The allocator gives them back when the card is full, so they never decide whether a
            setting fits.
        device_bytes: Memory that the card shows as used: reserved, the CUDA context and NCCL's buffers.
        host_bytes: Host memory of one rank at the peak of loading or training.
        low_bytes: Lower end of the interval around `device_bytes`.
        high_bytes: Upper end, which decides whether a setting fits. What fits is bounded by the card.
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

    @property
    def half_bytes(self) -> float:
        """Half the width of the interval, were it not bounded by the card."""
        return self.device_bytes - self.low_bytes

    @property
    def needed_bytes(self) -> float:
        """Memory on the card without hoarded blocks."""
        return self.device_bytes - self.hoarded_bytes

    @property
    def least_bytes(self) -> float:
        """The upper end without hoarded blocks: the memory of the smallest card on which it fits."""
        return self.needed_bytes + self.half_bytes - ALLOCATOR_MARGIN * self.hoarded_bytes

    @property
    def text(self) -> str:
        """``61.2 ± 4.9 GiB``, or ``18.6 to 24.0 GiB`` where the card bounds the interval."""
        low, device, half, high = (
            size / 2**30 for size in (self.low_bytes, self.device_bytes, self.half_bytes, self.high_bytes)
        )
        return f"{low:.1f} to {high:.1f} GiB" if self.is_bounded else f"{device:.1f} ± {half:.1f} GiB"

    @property
    def is_bounded(self) -> bool:
        """True if blocks that the allocator keeps could fill the card."""
        return self.high_bytes < 0.999 * (self.device_bytes + self.half_bytes)

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
    fullest = max(estimates, key=lambda estimate: estimate.least_bytes)
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
    if not _keeps_gradients(setup):
        step = step.without_earlier_gradients()
    # Buffers for every micro-batch, as torch's `PipelineStage` allocates them once for all steps.
    hidden = setup.micro_batch_size * setup.sequence_length * share.facts.hidden_size * seen.trained_bytes
    ranks = setup.parallel.sequence_parallel * setup.parallel.stream_ranks
    buffers = share.num_received * setup.accumulation * hidden / ranks
    moved = transfers(share.facts, setup, fills_buffers=not (is_cuda or is_tracked))
    phases = step_phases(setup, states, step, moved, buffers)
    phases += passes_beside(share.facts, setup, states, step, is_cuda=is_cuda)
    phases = tuple(beside_vllm(phase, setup) for phase in phases)
    fullest = max(phases, key=lambda phase: phase.total_bytes)
    totals = {phase.name: phase.total_bytes for phase in phases}
    gathers_again = setup.parallel.reshard_after_forward or setup.parallel.pipeline_parallel > 1
    tensors = TensorBytes(
        peak=fullest.total_bytes,
        states=fullest.state_bytes,
        with_loss=totals[FORWARD],
        passes=max(totals[FORWARD], totals[LAST_LAYER], totals[FIRST_LAYER]),
        update=totals[UPDATE],
        # DeepSpeed makes its states before the first step.
        late_states=0.0 if setup.parallel.is_deepspeed else states.optimizer_bytes,
        gradients=states.gradient_bytes,
        gathered=moved.gathered_bytes if gathers_again else moved.first_gathered_bytes,
    )
    beside = beside_tensors(
        tensors,
        step,
        overhead=gpu_overhead(setup, is_cuda=is_cuda),
        share=hoarded_share(setup, share.facts.vocab_size, is_cuda=is_cuda),
        is_whole=takes_whole_logits(setup, share.facts.vocab_size),
        is_extending=setup.expandable_segments,
        limit_bytes=limit_bytes,
    )
    inputs, stays = _offloaded_bytes(share.facts, seen, is_cuda=is_cuda), setup.parallel.offloads
    host = max(states.host_bytes, inputs + states.host_bytes * stays)
    return MemoryEstimate(phases, states, step, host_bytes=host, **beside)


def _keeps_gradients(setup: TrainingSetup) -> bool:
    """True if a rank keeps every gradient of a pass whole, beside none of earlier micro-batches."""
    parallel = setup.parallel
    reduces = parallel.shards_gradients or parallel.shards_weights or setup.steps_in_backward
    return not reduces and setup.accumulation == 1


def _offloaded_bytes(model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool) -> float:
    """Layer inputs in host memory with offload checkpointing; torch rounds pinned blocks up to powers of two."""
    if setup.checkpointing != "offload":
        return 0.0
    ranks = setup.parallel.sequence_parallel * setup.parallel.stream_ranks
    rows = setup.micro_batch_size * setup.sequence_length / ranks
    itemsize = setup.trained_bytes if setup.trains_all else setup.frozen_bytes
    size = rows * model.hidden_size * itemsize
    return model.num_layers * (2.0 ** math.ceil(math.log2(size)) if is_cuda else size)
