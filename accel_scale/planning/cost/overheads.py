"""Memory outside tensors: what the allocator holds back, CUDA's context, NCCL's buffers; and how sure each part is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.activations import StepBytes

_GIB = 2**30

# Half the width of the interval around a prediction, as shares of its parts: weights, gradients and states, everything
# else in tensors, what the allocator holds back, context and NCCL. 71 of 78 published measurements of Hugging Face
# stacks lie inside (docs/planner_accuracy.md); where states are most of the memory, it is half as wide as elsewhere.
STATES_MARGIN, ACTIVATIONS_MARGIN, ALLOCATOR_MARGIN, CONTEXT_MARGIN = 0.04, 0.25, 0.5, 0.3

# What the allocator holds if micro-batches differ in length, beyond the tensors at the end of the forward pass and as
# a multiple of what head and loss allocate: a longer row's logits fit none of the blocks kept from shorter ones.
# Chunks of logits have one size, unless one holds all of a row's. benchmarks/allocator_lengths.py simulates 2.2 to 3.3
# and 0.6 to 1.1 for large vocabularies; ms-swift measured 1.3 to 3.6 with whole logits.
_HOARDED_SHARE, _HOARDED_IN_CHUNKS = 2.4, 0.8


@dataclass(frozen=True)
class Overhead:
    """Bytes besides tensors.

    Attributes:
        context_bytes: CUDA context and loaded kernels: 0.5 to 0.9 GiB from Ampere on.
        communication_bytes: NCCL's channels and buffers, if there is more than one rank.
        fragmentation_share: Share of the short-lived bytes that is lost in blocks of the wrong size, fitted to the
            published measurements.
        fragmentation_bytes: Minimum that the allocator keeps.
    """

    context_bytes: float
    communication_bytes: float
    fragmentation_share: float
    fragmentation_bytes: float


def gpu_overhead(setup: TrainingSetup, *, is_cuda: bool = True) -> Overhead:
    """The overhead of one rank; zero on a CPU, where only tensors are counted."""
    if not is_cuda:
        return Overhead(0.0, 0.0, 0.0, 0.0)
    communication = 1.0 * _GIB if setup.parallel.num_gpus > 1 else 0.0
    return Overhead(0.7 * _GIB, communication, 0.15, 0.6 * _GIB)


_WHOLE_LOGITS = ("full", "full_compiled", "chunked_logits")


def hoarded_share(setup: TrainingSetup, vocab_size: int, *, is_cuda: bool = True) -> float:
    """What the allocator holds of head and loss, as a multiple of their bytes; 0 if micro-batches have one length."""
    if not (is_cuda and setup.is_padded) or setup.expandable_segments:
        return 0.0
    logits = setup.micro_batch_size * setup.sequence_length * vocab_size
    is_whole = setup.loss in _WHOLE_LOGITS or (setup.loss == "chunked" and logits <= setup.chunk_logits)
    return _HOARDED_SHARE if is_whole else _HOARDED_IN_CHUNKS


class BesideTensors(TypedDict):
    """The fields of `MemoryEstimate` that go beyond tensors."""

    reserved_bytes: float
    hoarded_bytes: float
    device_bytes: float
    low_bytes: float
    high_bytes: float


def beside_tensors(
    *,
    peak: float,
    states: float,
    with_loss: float,
    gradients: float,
    step: StepBytes,
    overhead: Overhead,
    share: float,
    limit_bytes: float | None,
) -> BesideTensors:
    """Blocks that cannot be reused or are hoarded, the context, and the interval around all of it.

    Args:
        peak: Bytes in tensors at the peak.
        states: Of these, bytes whose size follows from the settings alone.
        with_loss: Bytes in tensors at the end of the forward pass.
        gradients: Bytes of gradients on the card after a step's passes.
        step: Memory peaks of the activations, and of whole gradients.
        overhead: Of the rank.
        share: `hoarded_share`.
        limit_bytes: Memory of the card; None: large enough.
    """
    bottom = step.backward_bottom_bytes - step.gradient_bytes + gradients
    passes = max(step.forward_bytes, step.loss_bytes, step.backward_top_bytes, bottom)
    churn = passes - step.saved_bytes + 0.25 * step.saved_bytes
    lost = overhead.fragmentation_share * max(0.0, churn) + overhead.fragmentation_bytes
    context = overhead.context_bytes + overhead.communication_bytes
    needed = peak + lost + context
    margin = STATES_MARGIN * states + ACTIVATIONS_MARGIN * (peak - states)
    margin += ALLOCATOR_MARGIN * lost + CONTEXT_MARGIN * context
    hoarded = 0.0
    if share:
        # Other phases fill hoarded blocks before they ask for more.
        blocks = max(0.0, step.loss_bytes - step.forward_bytes)
        hoarded = max(0.0, with_loss + share * blocks - peak - lost)
        if limit_bytes is not None:
            hoarded = min(hoarded, max(0.0, limit_bytes - needed - margin) / (1 + ALLOCATOR_MARGIN))
    margin += ALLOCATOR_MARGIN * hoarded
    device = needed + hoarded
    return {
        "reserved_bytes": device - context,
        "hoarded_bytes": hoarded,
        "device_bytes": device,
        "low_bytes": device - margin,
        "high_bytes": device + margin,
    }
