"""Memory outside tensors: fragmentation of the allocator, CUDA's context, NCCL's buffers."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.planning.models.training_setup import TrainingSetup

_GIB = 2**30

# Half the width of the interval around a prediction, as a share of it: the spread of published measurements of one
# configuration between versions of a stack, see docs/planner_accuracy.md.
MARGIN_SHARE = 0.12


@dataclass(frozen=True)
class Overhead:
    """Bytes besides tensors.

    Attributes:
        context_bytes: CUDA context and loaded kernels: 0.5 to 0.9 GiB from Ampere on.
        communication_bytes: NCCL's channels and buffers, if there is more than one rank.
        fragmentation_share: Share of the short-lived bytes that is lost in blocks of the wrong size.
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
    return Overhead(0.7 * _GIB, communication, 0.1, 0.6 * _GIB)
