"""The branch of the decision tree that a setup is on: the sections of docs/choosing.md, simplest first."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.planning.models.training_setup import TrainingSetup


@dataclass(frozen=True)
class Branch:
    """One way to make a run fit and go fast.

    Attributes:
        name: The heading of its section.
        why: What it does, for a line under a plan.
    """

    name: str
    why: str

    @property
    def line(self) -> str:
        """``branch: data parallel (docs/choosing.md#data-parallel): each GPU holds …``"""
        return f"branch: {self.name} (docs/choosing.md#{self.name.replace(' ', '-')}): {self.why}"


ONE_GPU = Branch("one gpu", "everything fits on one; nothing has to be given up")
ACCUMULATE = Branch("accumulate", "a small micro-batch several times per step makes the same global batch")
CHECKPOINT = Branch("checkpoint", "activations are computed again in the backward pass: less memory, more time")
QUANTISE = Branch("quantise", "the base is frozen in 4 bits, and adapters learn")
DATA_PARALLEL = Branch(
    "data parallel", "each GPU holds the whole run; raise the learning rate with the batch, warmed up"
)
SHARD_STATES = Branch("shard the states", "weights fit on each GPU, gradients and optimizer states are split")
SHARD_ALL = Branch("shard everything", "weights, gradients and optimizer states are split over the GPUs")
LONG_ROWS = Branch("share the rows", "rows are too long for one GPU and are split over several")
OFFLOAD = Branch("offload", "the host or an NVMe drive holds what the GPUs cannot: slower, so compare with more GPUs")
DIVIDE = Branch("divide the layers", "tensor and pipeline parallelism, with data parallelism around them")
BRANCHES = (
    ONE_GPU, ACCUMULATE, CHECKPOINT, QUANTISE, DATA_PARALLEL, SHARD_STATES, SHARD_ALL, LONG_ROWS, OFFLOAD, DIVIDE,
)  # fmt: skip


def branch_of(setup: TrainingSetup) -> Branch:
    """The furthest branch that `setup` has reached; it may include smaller steps on the way."""
    parallel = setup.parallel
    reached = {
        DIVIDE: parallel.tensor_parallel > 1 or parallel.pipeline_parallel > 1,
        OFFLOAD: parallel.offloads,
        LONG_ROWS: parallel.sequence_parallel > 1,
        SHARD_ALL: parallel.shards_weights and parallel.num_gpus > 1,
        SHARD_STATES: parallel.shards_states and parallel.num_gpus > 1,
        DATA_PARALLEL: parallel.num_gpus > 1,
        QUANTISE: setup.quantises_base,
        CHECKPOINT: setup.checkpointing != "none",
        ACCUMULATE: setup.accumulation > 1,
    }
    return next((branch for branch, is_reached in reached.items() if is_reached), ONE_GPU)
