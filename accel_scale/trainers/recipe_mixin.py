"""The recipes' additions to any TRL trainer: schedule, meters, held-out questions, a profile, figures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from accel_scale.flags.common import SharedArguments
from accel_scale.flags.guard_settings import GuardSettings
from accel_scale.measuring.meters import Counted, ThroughputMeter, clock_of, logged_figures
from accel_scale.measuring.profiling import StepProfiler
from accel_scale.modeling.fsdp2_preparation import mend_fsdp2_preparation
from accel_scale.modeling.precision import enable_fp16_on_cpu
from accel_scale.optimization.schedules import create_schedule
from accel_scale.report_page.leaving import leave_stopped
from accel_scale.settings.trl_config import RecipeConfig
from accel_scale.trainers.tracker_names import use_tracker_names
from accel_scale.training.ddp.gradient_numbers import loss_scale_of, use_gradient_numbers
from accel_scale.training.ddp.hooks import hook_figures
from accel_scale.training.evaluation.exact_match import ExactMatch, exact_match
from accel_scale.training.evaluation.progress import MeterCallback, MetricsCallback, show_progress
from accel_scale.training.resilience.collective_timeout import StepCallback, watch_accelerator
from accel_scale.verifying.memory_summary import watched_steps

if TYPE_CHECKING:
    from transformers import Trainer

    from accel_scale.trainers.guard_mixin import GuardMixin
    from accel_scale.trainers.recovery_mixin import MemoryRecoveryMixin
    from accel_scale.trainers.saving_mixin import AtomicSavingMixin

    class _TrainerBase(GuardMixin, MemoryRecoveryMixin, AtomicSavingMixin, Trainer):
        """Type of the base classes that follow in a recipe's trainer."""
else:
    _TrainerBase = object


class RecipeTrainerMixin(_TrainerBase):
    """Put first among a trainer's base classes, before the other mixins: it applies the settings of `resolve`.

    Args:
        program: The recipe's name in messages.
        schedule: Keyword arguments of `create_schedule` besides the optimizer and the number of steps.
        adapter_dtype: Dtype of adapter weights; TRL casts those of a quantised model to bf16 in any precision, which
            loses small updates.
        verify_first_checkpoint: Read the first save back and compare it with the weights in memory.
        recover_from_oom: Repeat a step that runs out of memory in smaller passes.
        guard: Settings of the guard; None takes all steps.
        questions: Held-out rows answered before the first and after the last step.
        max_new_tokens: Length limit of those answers.
        flags: The shared recipe flags that act on the trainer: a profile, a memory summary, dtypes of gradients.
        **kwargs: Arguments of TRL's trainer.
    """

    args: RecipeConfig
    sp_size: int = 1
    pushes_when_saved = False  # the model card comes with the summary, after the model

    def __init__(
        self,
        *,
        program: str,
        schedule: dict[str, Any] | None = None,
        adapter_dtype: torch.dtype | None = None,
        verify_first_checkpoint: bool = True,
        recover_from_oom: bool = True,
        guard: GuardSettings | None = None,
        questions: Sequence[dict[str, Any]] = (),
        max_new_tokens: int = 32,
        flags: SharedArguments | None = None,
        **kwargs: Any,
    ) -> None:
        self._schedule, self._flags = schedule or {}, flags or SharedArguments()
        self.answered: dict[str, dict[str, object]] = {}
        self.started, self._counted_before = time.perf_counter(), Counted()
        _overlap_uploads(kwargs["args"])
        super().__init__(**kwargs)
        self.meter = ThroughputMeter(clock_of(self.accelerator.device.type))
        self.refuse_rows()
        enable_fp16_on_cpu(self.accelerator)
        use_gradient_numbers(self.accelerator, self._flags)
        mend_fsdp2_preparation()
        self.verify_first_checkpoint = verify_first_checkpoint
        self.recover_from_oom = recover_from_oom
        self.guard_settings = guard
        self._questions, self._max_new_tokens = questions, max_new_tokens
        if adapter_dtype is not None:
            cast_trainable(self.model, adapter_dtype)
        self.add_callback(MeterCallback(self.meter))
        self.add_callback(MetricsCallback())
        watch_accelerator(self.accelerator, self.args.collective_timeout, program)
        self.add_callback(StepCallback())
        if questions:
            self.add_callback(_AnswerCallback(self))
        use_tracker_names(self)
        show_progress(self, self._tokens_per_second)

    def refuse_rows(self) -> None:
        """Refuse prepared rows from which nothing could be learnt."""

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with watched_steps(self._flags, str(self.args.output_dir), self.memory_summary) as profiler:
            self.add_callback(_ProfiledSteps(profiler))
            output: TrainOutput = super().train(*args, **kwargs)
            return output

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the recipe writes its own card at the end, with the run's figures."""

    def _leave(self) -> None:
        if self.is_world_process_zero():  # the launcher ends this rank as soon as another one has left
            leave_stopped(str(self.args.output_dir))
        super()._leave()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            ranks = self.accelerator.num_processes / self.sp_size
            logs.update(logged_figures(self.meter, ranks=ranks))
            scale = loss_scale_of(self.accelerator)
            if scale is not None:
                logs["loss_scale"] = scale
        super().log(logs, start_time)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule by ratios of the steps that will actually be taken."""
        if self.lr_scheduler is None:
            by_ratio = self._schedule.get("warmup_ratio") is not None
            kwargs: Any = self.args.lr_scheduler_kwargs
            chosen: Any = self.optimizer if optimizer is None else optimizer
            schedule: Any = create_schedule(
                chosen,
                self.args.schedule_name,
                num_training_steps=num_training_steps,
                warmup_steps=0 if by_ratio else self.args.get_warmup_steps(num_training_steps),
                scheduler_kwargs=kwargs,
                **self._schedule,
            )
            self.lr_scheduler, self._created_lr_scheduler = schedule, True
        return self.lr_scheduler

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Get the micro-batches of one optimizer step, and count their tokens without padding, once."""
        self.meter.start_step()
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self.meter.fetched()
        for batch in batches:
            self.meter.add_tokens(self.num_tokens_of(batch))
        return batches, num_items

    def num_tokens_of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | int:
        """Tokens of a micro-batch without padding."""
        mask = batch.get("attention_mask")
        return mask.sum() if mask is not None and mask.dim() == 2 else batch["input_ids"].numel()

    def answer_questions(self, when: str) -> None:
        """Answer the held-out questions with the current weights, under any sharding; call it on every rank."""
        # Under autocast, as in training: a bf16 base and fp32 embeddings trained beside adapters meet in one product.
        with self.accelerator.autocast():
            result = exact_match(
                self.model_wrapped if hasattr(self.model_wrapped, "generate") else self.model,
                self.processing_class,
                self._questions,
                max_new_tokens=self._max_new_tokens,
                rank=self.accelerator.process_index,
                world_size=self.accelerator.num_processes,
                reduce=lambda counts: self.accelerator.reduce(counts, "sum"),
            )
        self.answered[when] = _as_dict(result, with_examples=not self.args.push_to_hub)

    def counters(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self._counted()),
            "num_tokens": int(getattr(self, "_total_train_tokens", 0)),  # a tensor between two lines of the log
            "answered": self.answered,
        }

    def _counted(self) -> Counted:
        tokens = sum(self._meeting.gather(float(self.meter.num_tokens))) / self.sp_size
        return self._counted_before.and_now(self.meter, tokens=tokens, started=self.started)

    def take_up_counters(self, counters: dict[str, Any]) -> None:
        if counters:
            self._total_train_tokens, self.answered = counters["num_tokens"], dict(counters["answered"])
            self._counted_before = Counted.of(counters)

    def _tokens_per_second(self) -> float | None:
        """Rate over all ranks, assuming that they are as fast as this one; `figures` gathers the real rates."""
        mine = self.meter.tokens_per_second
        return mine and mine * self.accelerator.num_processes / self.sp_size

    def figures(self) -> dict[str, Any]:
        """The run's measurements, summed over ranks where applicable; call it on every rank."""
        meter = self.meter
        mine = torch.tensor(meter.tokens_per_second or 0.0, device=self.accelerator.device)
        # Each rank that shares rows has counted all of them.
        speed, counted = self.accelerator.reduce(mine, "sum").item() / self.sp_size, self._counted()
        history = self.state.log_history
        evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return {
            "optimizer": type(optimizer).__name__,
            "steps": self.state.global_step,
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "eval_loss": evaluated[-1] if evaluated else None,
            "tokens": counted.tokens,
            "seconds": counted.seconds,
            "tokens_per_second": speed or None,
            "data_wait_ratio": counted.data_wait_ratio,
            "memory_recovery": self.recovery_summary(),
            "guard": self.guard_summary(),
            "ddp": hook_figures(self.model_wrapped),
            "exact_match": self.answered,
        }


class _ProfiledSteps(TrainerCallback):
    """Tells the profiler that a step has ended."""

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler

    def on_step_end(self, *unused: object, **more: object) -> None:
        self._profiler.step()


class _AnswerCallback(TrainerCallback):
    """Asks the questions once everything is prepared, and after the last step."""

    def __init__(self, trainer: RecipeTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if state.global_step == 0:  # a resumed run is not at its beginning
            self._trainer.answer_questions("before")

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self._trainer.stopped_by is None:  # otherwise there is little time left
            self._trainer.answer_questions("after")


def _overlap_uploads(args: RecipeConfig) -> None:
    """Let batches be copied while the device computes; only pinned memory can be copied without the host."""
    if args.dataloader_pin_memory and args.device.type in ("cuda", "xpu"):
        args.accelerator_config.non_blocking = True  # type: ignore[union-attr]  # transformers has parsed it


def cast_trainable(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Keep every trainable weight of `model` in `dtype`."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _as_dict(result: ExactMatch, *, with_examples: bool) -> dict[str, object]:
    """For the summary; examples are left out of a folder that is pushed to the hub."""
    return {
        "accuracy": result.accuracy,
        "num_correct": result.num_correct,
        "num_questions": result.num_questions,
        "seconds": result.seconds,
        "tasks": {name: score.accuracy for name, score in result.tasks.items()},
        "examples": [dataclasses.asdict(example) for example in result.examples] if with_examples else [],
    }
