"""A pretraining run: its decisions, what it has loaded, and its position in training."""

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
    """One run. What is loaded later has no value before that: reading it too early is an AttributeError.

    Attributes:
        layout: What each rank does.
        embedded: Whether it trains on the embedded text.
        course: Whether the run begins, goes on or is finished.
        parallel: The parts of a model that ranks share; None where each holds all of it or Accelerate shards it.
        router: The auxiliary loss of a mixture of experts, where the configuration asks for it.
        step: Optimizer steps taken.
        drawn: Batches taken from the data: more than steps once the guard has skipped some.
        avoided: Batches to go around after a rollback.
        tokens: Trained on.
        counted: What earlier starts have counted, for the report.
        compiling: What was decided about compiled layers.
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
    parameters: tuple[int, int] = field(init=False)  # all, trained ones
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
        """Of the next step, unless the guard lowers it."""
        return float(self.schedule.get_last_lr()[0])

    @property
    def memory_summary(self) -> MemorySummary:
        """Writes what lies in this rank's memory into the output folder."""
        from accel_scale.verifying.memory_summary import MemorySummary

        return MemorySummary(
            self.args.output_dir,
            rank=self.launch.rank,
            device=self.accelerator.device,
            parts=lambda: (self.model, self.optimizer),
        )

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Rows of one, and how many of them this rank takes per optimizer step."""
        rows = self.args.per_device_train_batch_size
        return rows, self.settings.global_batch_size // (rows * self.layout.data_ranks)

    def on_device(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of a micro-batch where the model is; this rank's part of them where ranks share rows."""
        device = self.accelerator.device
        moved = {name: held.to(device, non_blocking=True) for name, held in rows.items() if hasattr(held, "to")}
        return self.parallel.local(moved) if self.parallel else moved

    def facts(self, rows: Mapping[str, torch.Tensor]) -> RowFacts | None:
        """What the host knows of a micro-batch; of parts of rows nothing."""
        from accel_scale.modeling.packing.row_facts import RowFacts

        return None if self.parallel else RowFacts(rows)

    def sample(self) -> str:
        """What the model writes after ``--sample_prompt`` or the beginning of the held-out text."""
        from accel_scale.training.evaluation.validation import beginning_of, sample_text

        prompt = self.args.sample_prompt or beginning_of(self.held_out, self.tokenizer)
        options = {"max_new_tokens": self.args.sample_tokens, "seed": self.args.seed}
        return f"{prompt}▸{sample_text(self.accelerator, self.model, self.tokenizer, prompt, **options)}"

    def say_stopped(self, line: str) -> None:
        """Print one line on one process, and again after the launcher's own report."""
        from accel_scale.ending.last_word import repeat_last

        self.say(line)
        repeat_last(line)
