"""The search's request and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_scale.facts.hardware import Machine
from accel_scale.facts.optimizer_specs import LEAN_OPTIMIZERS
from accel_scale.facts.stacks import OURS
from accel_scale.planning.cost.memory import MemoryEstimate
from accel_scale.planning.cost.strategies import ParallelChoice
from accel_scale.planning.cost.timing import TimeEstimate
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.model_parallel import Degrees
from accel_scale.planning.search.recipe_choices import SFT_PLAN, PlannedRecipe

_CHECKPOINTING = ("none", "selective", "full", "offload")


@dataclass(frozen=True)
class Request:
    """What to train, on which machine, and what the user has already decided.

    Attributes:
        model: The model to train.
        machine: The machine to train on.
        global_batch_size: Sequences per optimizer step over all ranks.
        sequence_length: Tokens per row.
        methods: Training methods to choose from.
        fixed: Fields of `TrainingSetup` that are decided, by name.
        strategies: Labels of strategies to choose from; empty: all.
        document_length: Average tokens per document, if rows are packed.
        choices: Ways to distribute the run, such as a launch file's; empty: all that the machine offers.
        is_cuda: Whether the kernels are CUDA's.
        recipe: The recipe that will run the plan.
        degrees: Degrees of model parallelism, if requested.
        schedule: Schedule of a pipeline.
        stack: A name in `facts.stacks`, whose defaults fill in what is left open.
    """

    model: ModelFacts
    machine: Machine
    global_batch_size: int = 64
    sequence_length: int = 2048
    methods: tuple[str, ...] = ("full",)
    fixed: dict[str, Any] = field(default_factory=dict)
    strategies: tuple[str, ...] = ()
    document_length: float | None = None
    choices: tuple[ParallelChoice, ...] = ()
    is_cuda: bool = True
    recipe: PlannedRecipe = SFT_PLAN
    degrees: Degrees = field(default_factory=Degrees)
    schedule: str = "1f1b"
    stack: str = OURS


@dataclass(frozen=True)
class Candidate:
    """One setting with its predictions; `time` is None on a card whose speed is unknown."""

    choice: ParallelChoice
    setup: TrainingSetup
    memory: MemoryEstimate
    time: TimeEstimate | None

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Smaller is simpler: strategy, checkpointing, optimizer."""
        setup = self.setup
        lean = LEAN_OPTIMIZERS.index(setup.optimizer) if setup.optimizer in LEAN_OPTIMIZERS else 0
        policy = setup.checkpointing
        return self.choice.effort, _CHECKPOINTING.index(policy) if policy in _CHECKPOINTING else 1, lean


@dataclass(frozen=True)
class Rejection:
    """A strategy that cannot run, or none of whose settings fits.

    Attributes:
        setup: Its leanest setting; None if none can run.
        memory: The prediction for that setting.
    """

    label: str
    method: str
    reason: str
    setup: TrainingSetup | None = None
    memory: MemoryEstimate | None = None


@dataclass(frozen=True)
class Plan:
    """The settings that fit, fastest first, and why the rest do not."""

    request: Request
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    num_considered: int

    @property
    def best(self) -> Candidate | None:
        """The first choice; None if nothing fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def nearest_miss(self) -> Rejection | None:
        """The smallest of the settings that do not fit on the cards."""
        missed = [rejection for rejection in self.rejections if rejection.memory is not None]
        return min(missed, key=lambda rejection: rejection.memory.least_bytes, default=None)  # type: ignore[union-attr]
