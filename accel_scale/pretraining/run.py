"""A pretraining run: its decisions, its loaded parts, and its position in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_scale.flags.guard import GuardArguments
from accel_scale.flags.parallel import ParallelArguments
from accel_scale.flags.pretraining import (
    PretrainArguments,
    PretrainDataArguments,
    PretrainModelArguments,
)
from accel_scale.pretraining.trunk import ScheduleRecord
from accel_scale.starting.recipe_start import RecipeRun

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from accel_scale.data.pretraining.loader import TrainLoader
    from accel_scale.data.pretraining.opened import PretrainingData
    from accel_scale.data.pretraining.validation import ValidationLoader
    from accel_scale.modeling.packing.row_facts import RowFacts
    from accel_scale.optimization.router_loss import RouterLoss
    from accel_scale.parallel.layout import ParallelLayout
    from accel_scale.parallel.model_parallel import ModelParallel
    from accel_scale.pretraining.resolve import RunLength
    from accel_scale.settings.planned import RunPlan
    from accel_scale.training.checkpoints.going_on import Course
    from accel_scale.verifying.memory_summary import MemorySummary


@dataclass
class Run(RecipeRun):
    """One run. Attributes loaded later have no value before that: reading one too early is an AttributeError.

    Attributes:
        layout: The role of each rank.
        embedded: True if it trains on the embedded text.
        course: Whether the run starts, resumes or is finished.
        parallel: The parts of a model that ranks share; None if each rank holds it whole or Accelerate shards it.
        router: The auxiliary loss of a mixture of experts, if the configuration asks for it.
        step: Optimizer steps taken.
        drawn: Batches drawn from the data; more than `step` once the guard has skipped some.
        avoided: Batches to leave out after a rollback.
        tokens: Tokens trained on.
        counted: Counts of earlier starts, for the report.
        compiling: The decision about compiled layers.
    """

    model_args: PretrainModelArguments
    data_args: PretrainDataArguments
    args: PretrainArguments
    parallel_args: ParallelArguments
    guard_args: GuardArguments
    layout: ParallelLayout
    embedded: bool

    accelerator: Accelerator = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    data: PretrainingData = field(init=False)
    model_config: PreTrainedConfig = field(init=False)
    course: Course = field(init=False)

    attention: str = field(init=False)
    plan: RunPlan | None = field(init=False)
    length: RunLength = field(init=False)
    parameters: tuple[int, int] = field(init=False)  # all, trained
    parallel: ModelParallel | None = field(init=False)
    router: RouterLoss | None = field(init=False)
    model: nn.Module = field(init=False)
    optimizer: AcceleratedOptimizer = field(init=False)
    schedule: AcceleratedScheduler = field(init=False)
    schedule_record: ScheduleRecord = field(default_factory=ScheduleRecord)

    batches: TrainLoader = field(init=False)
    held_out: ValidationLoader | None = None
    step: int = 0
    drawn: int = 0
    avoided: list[int] = field(default_factory=list)
    tokens: int = 0
    counted: dict[str, float] = field(default_factory=dict)
    compiling: dict[str, object] = field(default_factory=dict)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step, unless the guard lowers it."""
        return float(self.schedule.get_last_lr()[0])

    @property
    def memory_summary(self) -> MemorySummary:
        """Writes a summary of this rank's memory into the output folder."""
        from accel_scale.verifying.memory_summary import MemorySummary

        return MemorySummary(
            self.args.output_dir,
            rank=self.launch.rank,
            device=self.accelerator.device,
            parts=lambda: (self.model, self.optimizer),
        )

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Rows of a micro-batch, and number of micro-batches of this rank per optimizer step."""
        rows = self.args.per_device_train_batch_size
        return rows, self.settings.global_batch_size // (rows * self.layout.data_ranks)

    def on_device(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Move a micro-batch's tensors to the model's device; if ranks share rows, only this rank's part of them."""
        device = self.accelerator.device
        moved = {name: held.to(device, non_blocking=True) for name, held in rows.items() if hasattr(held, "to")}
        return self.parallel.local(moved) if self.parallel else moved

    def facts(self, rows: Mapping[str, torch.Tensor]) -> RowFacts | None:
        """Facts about a micro-batch known on the host; None for parts of rows."""
        from accel_scale.modeling.packing.row_facts import RowFacts

        return None if self.parallel else RowFacts(rows)

    def sample(self) -> str:
        """Generate text after ``--sample_prompt`` or the beginning of the held-out text."""
        from accel_scale.training.evaluation.validation import beginning_of, sample_text

        prompt = self.args.sample_prompt or beginning_of(self.held_out, self.tokenizer)
        options = {"max_new_tokens": self.args.sample_tokens, "seed": self.args.seed}
        return f"{prompt}▸{sample_text(self.accelerator, self.model, self.tokenizer, prompt, **options)}"

    def say_stopped(self, line: str) -> None:
        """Print one line on one process, and again after the launcher's own report."""
        from accel_scale.ending.last_word import repeat_last

        self.say(line)
        repeat_last(line)
