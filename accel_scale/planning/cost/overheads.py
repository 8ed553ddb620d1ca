"""Memory outside tensors: what the allocator holds back, CUDA's context, NCCL's buffers; and how sure each part is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.marks import StepBytes

_GIB = 2**30

# Half the width of the interval around a prediction, as shares of its parts: weights, gradients and states, everything
# else in tensors, what the allocator holds back, context and NCCL. 75 of 79 published measurements of Hugging Face
# stacks lie inside (docs/planner_accuracy.md); where states are most of the memory, it is half as wide as elsewhere.
STATES_MARGIN, ACTIVATIONS_MARGIN, ALLOCATOR_MARGIN, CONTEXT_MARGIN = 0.04, 0.25, 0.5, 0.3

# What the allocator holds if micro-batches differ in length, beyond the tensors at the end of the forward pass and as
# a multiple of what head and loss allocate: a longer row's logits fit none of the blocks kept from shorter ones.
# Chunks of logits have one size, unless one holds all of a row's. benchmarks/allocator_lengths.py simulates 2.2 to 3.3
# and 0.6 to 1.1 for large vocabularies; ms-swift measured 1.3 to 3.6 with whole logits.
_HOARDED_SHARE, _HOARDED_IN_CHUNKS = 2.4, 0.8

# With rows of one length: shares of what head and loss allocate, of what the last layer's backward pass adds to the
# forward pass, and of what a layer allocates besides what is saved; from benchmarks/allocator_steps.py.
_HELD_WHOLE, _HELD_IN_CHUNKS = (0.2, 1.0, 0.1), (0.2, 0.1, 0.9)


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
    if not (is_cuda and setup.is_padded):
        return 0.0
    return _HOARDED_SHARE if takes_whole_logits(setup, vocab_size) else _HOARDED_IN_CHUNKS


def takes_whole_logits(setup: TrainingSetup, vocab_size: int) -> bool:
    """True if all logits of a micro-batch exist at once."""
    logits = setup.micro_batch_size * setup.sequence_length * vocab_size
    return setup.loss in _WHOLE_LOGITS or (setup.loss == "chunked" and logits <= setup.chunk_logits)


class BesideTensors(TypedDict):
    """The fields of `MemoryEstimate` that go beyond tensors."""

    reserved_bytes: float
    hoarded_bytes: float
    device_bytes: float
    low_bytes: float
    high_bytes: float


@dataclass(frozen=True)
class TensorBytes:
    """Bytes in tensors at moments of a step.

    Attributes:
        peak: At the highest of all moments.
        states: Of these, bytes whose size follows from the settings alone.
        with_loss: At the end of the forward pass.
        passes: At the highest moment of forward and backward passes.
        update: While the optimizer steps.
        late_states: Optimizer states that the first step makes, when a forward and a backward pass have been done.
        gradients: Gradients on the card after a step's passes.
        gathered: Weights that are gathered at a time while layers run.
    """

    peak: float
    states: float
    with_loss: float
    passes: float
    update: float
    late_states: float
    gradients: float
    gathered: float


def held_bytes(tensors: TensorBytes, step: StepBytes, *, is_whole: bool) -> float:
    """What torch's allocator holds after some steps of rows of one length: tensors, and blocks that nothing fits.

    Blocks of the layers' tensors are too small for logits. States made after the first backward pass take the blocks
    of its activations, which need as much again in the next step. Blocks of gathered weights wait for the GPU before
    they are used again, so twice as much is held.

    Args:
        tensors: Bytes of one rank.
        step: Memory peaks of the activations.
        is_whole: Whether head and loss compute all logits of a micro-batch at once.
    """
    head = max(0.0, step.loss_bytes - step.forward_bytes)
    last_layer = max(0.0, step.backward_top_bytes - step.forward_bytes)
    working = step.forward_bytes - step.saved_bytes
    of_head, of_last, of_working = _HELD_WHOLE if is_whole else _HELD_IN_CHUNKS
    apart = max(0.0, of_head * head + of_last * last_layer + of_working * working)
    first = max(tensors.update, tensors.passes - tensors.late_states + apart)
    activations = max(step.forward_bytes, step.loss_bytes, step.backward_bottom_bytes - step.gradient_bytes)
    return first + min(activations, tensors.late_states) + tensors.gathered


def beside_tensors(
    tensors: TensorBytes,
    step: StepBytes,
    *,
    overhead: Overhead,
    share: float,
    is_whole: bool,
    is_extending: bool,
    limit_bytes: float | None,
) -> BesideTensors:
    """Blocks that cannot be reused or are hoarded, the context, and the interval around all of it.

    Args:
        tensors: Bytes of one rank.
        step: Memory peaks of the activations, and of whole gradients.
        overhead: Of the rank.
        share: `hoarded_share`.
        is_whole: Whether head and loss compute all logits of a micro-batch at once.
        is_extending: Whether the allocator extends its segments, and so keeps no blocks that nothing fits.
        limit_bytes: Memory of the card; None: large enough.
    """
    peak, states, gradients = tensors.peak, tensors.states, tensors.gradients
    bottom = step.backward_bottom_bytes - step.gradient_bytes + gradients
    passes = max(step.forward_bytes, step.loss_bytes, step.backward_top_bytes, bottom)
    churn = passes - step.saved_bytes + 0.25 * step.saved_bytes
    lost = overhead.fragmentation_share * max(0.0, churn) + overhead.fragmentation_bytes
    context = overhead.context_bytes + overhead.communication_bytes
    needed = peak + lost + context
    margin = STATES_MARGIN * states + ACTIVATIONS_MARGIN * (peak - states)
    margin += ALLOCATOR_MARGIN * lost + CONTEXT_MARGIN * context
    hoarded = 0.0
    if overhead.fragmentation_bytes and not is_extending:
        # Other phases fill these blocks before they ask for more.
        blocks = max(0.0, step.loss_bytes - step.forward_bytes)
        hoarded = max(0.0, held_bytes(tensors, step, is_whole=is_whole) - peak - lost)
        of_lengths = max(0.0, tensors.with_loss + share * blocks - peak - lost) if share else 0.0
        if limit_bytes is not None:
            hoarded = min(hoarded, max(0.0, limit_bytes - needed))
            of_lengths = min(of_lengths, max(0.0, limit_bytes - needed - margin) / (1 + ALLOCATOR_MARGIN))
        hoarded = max(hoarded, of_lengths)
    fits = limit_bytes is not None and needed + margin <= limit_bytes
    margin += ALLOCATOR_MARGIN * hoarded
    device = needed + hoarded
    return {
        "reserved_bytes": device - context,
        "hoarded_bytes": hoarded,
        "device_bytes": device,
        "low_bytes": device - margin,
        # What is hoarded ends where the card does.
        "high_bytes": min(device + margin, limit_bytes) if fits and limit_bytes is not None else device + margin,
    }
