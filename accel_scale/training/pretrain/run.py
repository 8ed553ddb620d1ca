"""The pretraining recipe's decisions, and its position in training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_scale.flags.guard import GuardArguments
from accel_scale.flags.parallel import ParallelArguments
from accel_scale.flags.pretraining import (
    PretrainArguments,
    PretrainDataArguments,
    PretrainModelArguments,
)


@dataclass
class Run:
    """Everything decided before training, and where training is."""

    settings: Any  # accel_scale.settings.resolve.Resolved
    start: Any  # accel_scale.starting.recipe_start.Start
    model_args: PretrainModelArguments
    data_args: PretrainDataArguments
    args: PretrainArguments
    parallel_args: ParallelArguments
    guard_args: GuardArguments
    layout: Any  # accel_scale.parallel.layout.ParallelLayout
    embedded: bool
    accelerator: Any = None
    tokenizer: Any = None
    model_config: Any = None
    course: Any = None  # accel_scale.training.checkpoints.going_on.Course
    attention: str = ""
    data: Any = None  # accel_scale.data.pretraining.PretrainingData
    batches: Any = None
    parallel: Any = None  # accel_scale.parallel.model_parallel.ModelParallel, where ranks share the model
    router: Any = None  # accel_scale.optimization.router_loss.RouterLoss, where the configuration asks for it
    model: Any = None
    optimizer: Any = None
    schedule: Any = None
    length: Any = None  # accel_scale.training.pretrain.resolve.RunLength
    parameters: tuple[int, int] = (0, 0)
    plan: Any = None
    held_out: Any = None
    schedule_record: dict[str, Any] = field(default_factory=dict)
    step: int = 0  # optimizer steps taken
    drawn: int = 0  # batches taken from the data: more than steps once the guard has skipped some
    avoided: list[int] = field(default_factory=list)  # batches to go around after a rollback
    tokens: int = 0
    counted: dict[str, Any] = field(default_factory=dict)  # what earlier starts have counted, for the report

    @property
    def launch(self) -> Any:
        """How the process was launched."""
        return self.start.launch

    @property
    def learning_rate(self) -> float:
        """Of the next step, unless the guard lowers it."""
        return float(self.schedule.get_last_lr()[0])

    @property
    def is_main(self) -> bool:
        """Whether this process speaks."""
        return self.launch.rank == 0

    def say_stopped(self, line: str) -> None:
        """Print one line on one process, and again after the launcher's own report."""
        from accel_scale.ending.last_word import repeat_last

        self.say(line)
        repeat_last(line)

    def say(self, line: str) -> None:
        """Print one line, on one process."""
        if self.is_main:
            print(line, flush=True)
