"""Peak memory of one rank: phases of a training step, each a sum of named terms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from accel_scale.planning.activations import StepBytes, step_bytes
from accel_scale.planning.model_facts import ModelFacts
from accel_scale.planning.overheads import MARGIN_SHARE, Overhead, gpu_overhead
from accel_scale.planning.sharding import StateBytes, state_bytes
from accel_scale.planning.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.transfers import transfers


@dataclass(frozen=True)
class Phase:
    """One moment of a step and what is on the card then, in bytes by name."""

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
        step: High-water marks of the activations.
        reserved_bytes: What torch's allocator holds at the peak: allocated and lost between blocks.
        device_bytes: What the card shows as used: reserved, the CUDA context and NCCL's buffers.
        host_bytes: Host memory of one rank at the peak of loading or training.
        low_bytes: Lower end of the interval around `device_bytes`.
        high_bytes: Upper end; whether a setting fits is decided on it.
    """

    phases: tuple[Phase, ...]
    states: StateBytes
    step: StepBytes
    reserved_bytes: float
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
        """Bytes in tensors at the peak: what ``torch.cuda.max_memory_allocated`` shows."""
        return self.peak_phase.total_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "allocated_bytes": round(self.peak_bytes),
            "reserved_bytes": round(self.reserved_bytes),
            "device_bytes": round(self.device_bytes),
            "low_bytes": round(self.low_bytes),
            "high_bytes": round(self.high_bytes),
            "host_bytes": round(self.host_bytes),
            "peak_phase": self.peak_phase.name,
            "phases": {p.name: {name: round(value) for name, value in p.terms} for p in self.phases},
        }


def predict_memory(
    model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool = True, is_tracked: bool = False
) -> MemoryEstimate:
    """Peak memory of the rank that needs most.

    Args:
        model: Its shapes.
        setup: How it is trained.
        is_cuda: Whether the kernels are CUDA's.
        is_tracked: Whether a memory tracker watches (see `step_bytes`).

    Raises:
        ConfigError: for a model, optimizer or policy that is not modelled.
    """
    states = state_bytes(model, setup)
    step = step_bytes(_stage(model, setup), _forward_setup(setup), is_cuda=is_cuda, is_tracked=is_tracked)
    # 1F1B keeps as many micro-batches in flight as there are stages; the first stage keeps all of them.
    waiting = min(setup.parallel.pipeline_parallel, setup.accumulation) - 1
    step = step.with_waiting(waiting * step.saved_bytes)
    phases = _phases(model, setup, states, step)
    overhead = gpu_overhead(setup, is_cuda=is_cuda)
    peak = max(phase.total_bytes for phase in phases)
    reserved, device, low, high = _interval(peak, step, overhead)
    return MemoryEstimate(phases, states, step, reserved, device, states.host_bytes, low, high)


def _stage(model: ModelFacts, setup: TrainingSetup) -> ModelFacts:
    """The layers of the fullest pipeline stage, with embedding and head as if it had both."""
    stages = setup.parallel.pipeline_parallel
    if stages == 1:
        return model
    layers = tuple(replace(layer, count=math.ceil(layer.count / stages)) for layer in model.layers)
    return replace(model, layers=layers)


def _forward_setup(setup: TrainingSetup) -> TrainingSetup:
    """`setup` as the layers see it: what does not change their tensors is dropped, so that walks are shared.

    Under mixed precision FSDP and DeepSpeed hand the layers 16-bit weights, and autocast has nothing to cast.
    """
    parallel = setup.parallel
    tensor, sequence = parallel.tensor_parallel, parallel.sequence_parallel
    seen = ParallelSetup(num_gpus=tensor * sequence, tensor_parallel=tensor, sequence_parallel=sequence)
    seen_setup = replace(setup, parallel=seen, optimizer="adamw_torch_fused", accumulation=1)
    if setup.precision in ("fp16", "bf16") and _casts_weights(setup):
        return replace(seen_setup, precision="bf16_true", weight_dtype=None)
    return seen_setup


def _casts_weights(setup: TrainingSetup) -> bool:
    return setup.parallel.is_deepspeed or setup.parallel.strategy.startswith("fsdp")


def _phases(model: ModelFacts, setup: TrainingSetup, states: StateBytes, step: StepBytes) -> tuple[Phase, ...]:
    """The moments at which memory can be highest."""
    resident = (
        ("weights", states.weight_bytes),
        ("master weights", states.master_bytes),
        ("optimizer states", states.optimizer_bytes),
    )
    moved = transfers(model, setup)
    kept = states.gradient_bytes
    from_earlier = max(kept, moved.waiting_gradient_bytes) if setup.accumulation > 1 else 0.0
    gathered, buckets = ("gathered weights", moved.gathered_bytes), ("communication buckets", moved.bucket_bytes)
    forward = Phase(
        "forward and loss",
        (
            *resident,
            ("gradients", from_earlier),
            ("activations and loss", max(step.forward_bytes, step.loss_bytes)),
            gathered,
        ),
    )
    # The walk's gradients are whole; at the last layer they are its own and the head's.
    top = Phase(
        "backward, last layer",
        (
            *resident,
            ("gradients", from_earlier),
            ("activations and loss", step.backward_top_bytes),
            gathered,
            buckets,
        ),
    )
    bottom = Phase(
        "backward, first layer",
        (
            *resident,
            ("gradients", max(min(from_earlier, kept), kept * (1 - moved.unreduced_share))),
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
            # DDP's and ZeRO's buckets stay allocated; FSDP's are gone.
            ("communication buckets", 0.0 if setup.parallel.strategy.startswith("fsdp") else moved.bucket_bytes),
        ),
    )
    load = Phase("load", (("weights", states.weight_bytes), ("largest weight", states.load_extra_bytes)))
    return load, forward, top, bottom, update


def _interval(peak: float, step: StepBytes, overhead: Overhead) -> tuple[float, float, float, float]:
    """(reserved, device, low, high): blocks that cannot be reused, context, and how far reality was off."""
    churn = step.peak_bytes - step.saved_bytes + 0.25 * step.saved_bytes
    reserved = peak + overhead.fragmentation_share * max(0.0, churn) + overhead.fragmentation_bytes
    device = reserved + overhead.context_bytes + overhead.communication_bytes
    margin = MARGIN_SHARE * device
    return reserved, device, device - margin, device + margin
