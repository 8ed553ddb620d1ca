"""`MemoryRecovery` in HF `Trainer` and TRL's `SFTTrainer`: on by default, replacing their training step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.ending.out_of_memory import is_out_of_memory, smaller_batch_advice
from accel_scale.facts.optimizer_specs import steps_in_backward
from accel_scale.optimization.batch_splitting import Part
from accel_scale.optimization.fast_loss import FastLossMixin
from accel_scale.training.resilience.memory_recovery import MemoryRecovery
from accel_scale.verifying.memory_summary import MemorySummary

if TYPE_CHECKING:
    from torch import nn


class MemoryRecoveryMixin:
    """Put first among a trainer's base classes: a step that runs out of memory is repeated in smaller passes.

    If the trainer's loss cannot be computed in parts (preference pairs, losses with statistics over the batch, metrics
    gathered in between), or its optimizer steps inside the backward pass, all processes stop instead, with one line
    that says so.

    Attributes:
        recover_from_oom: False leaves the training step as it is.
        recompute_more: Switches to checkpointing of every layer; None if that is in use already.
        memory_recovery: None until the first step.
    """

    recover_from_oom: bool = True
    recompute_more: Callable[[], None] | None = None
    memory_recovery: MemoryRecovery | None = None
    _loss_factor: float = 1.0
    _token_count_is_due: bool = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.memory_recovery = None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            if self.memory_recovery is None or not is_out_of_memory(error):
                raise
            self.memory_recovery.stop_run(error, words=self.in_user_words)
        finally:
            if self.memory_recovery is not None:
                self.memory_recovery.close()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        trainer: Any = self
        training_step = super().training_step  # type: ignore[misc]
        if not self._recovers:
            return training_step(model, inputs, num_items_in_batch)
        if self.memory_recovery is None:
            self.memory_recovery = self._make_recovery(model, num_items_in_batch)

        def run(part: Part) -> torch.Tensor:
            counted = getattr(trainer, "_new_tokens", None)
            self._loss_factor = part.factor
            try:
                return training_step(model, part.inputs, num_items_in_batch)
            finally:
                self._loss_factor = 1.0
                if not part.factor and counted is not None:
                    trainer._new_tokens = counted

        is_last = trainer.accelerator.sync_gradients
        loss = self.memory_recovery.micro_batch(inputs, run, is_last=is_last)
        if self._token_count_is_due:
            self._token_count_is_due = False
            super()._count_new_tokens()  # type: ignore[misc]
        return torch.as_tensor(loss, device=trainer.args.device)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        if self._loss_factor == 1.0:
            return result
        if isinstance(result, tuple):
            return result[0] * self._loss_factor, *result[1:]
        return result * self._loss_factor

    def _count_new_tokens(self) -> None:
        """Postpone `FastLossMixin`'s sum over ranks, taken in the middle of a pass, until the step has succeeded."""
        if self._recovers:
            self._token_count_is_due = True
        else:
            super()._count_new_tokens()  # type: ignore[misc]

    @property
    def _recovers(self) -> bool:
        """False under transformers' `auto_find_batch_size`, which needs the error in order to start over."""
        return self.recover_from_oom and not self.args.auto_find_batch_size  # type: ignore[attr-defined]

    def _make_recovery(self, model: nn.Module, num_items_in_batch: object) -> MemoryRecovery:
        trainer: Any = self

        def forget_tokens() -> None:
            self._token_count_is_due = False
            if hasattr(trainer, "_new_tokens"):
                trainer._new_tokens = 0

        def advice(level: int) -> str:
            rows = trainer.args.per_device_train_batch_size
            pieces = min(2**level, rows)
            text = smaller_batch_advice(rows // pieces, trainer.args.gradient_accumulation_steps * pieces)
            if any(Path(trainer.args.output_dir).glob("checkpoint-*")):
                text += "; --resume_from_checkpoint true continues from the last checkpoint"
            return self.in_user_words(text)

        return MemoryRecovery(
            trainer.accelerator,
            model,
            loss_kind="sum" if num_items_in_batch is not None else "token_mean",
            obstacle=_obstacle(trainer),
            advice=advice,
            recompute_more=self.recompute_more,
            on_discard=forget_tokens,
            on_out_of_memory=lambda step: self.memory_summary.write(f"out-of-memory-step-{step}"),
            first_step=trainer.state.global_step + 1,
            program=Path(sys.argv[0]).name or "training",
        )

    @property
    def memory_summary(self) -> MemorySummary:
        """Writes a summary of this rank's memory into the output folder."""
        trainer: Any = self
        return MemorySummary(
            trainer.args.output_dir,
            rank=trainer.args.process_index,
            device=trainer.accelerator.device,
            parts=lambda: (trainer.model, trainer.optimizer),
        )

    def in_user_words(self, advice: str) -> str:
        """Convert `advice`, which names flags, into the user's spelling."""
        return advice

    def recovery_summary(self) -> dict[str, object] | None:
        """For the run's summary: the repeated steps and the size of passes; None if no step was repeated."""
        recovery, args = self.memory_recovery, self.args  # type: ignore[attr-defined]
        if recovery is None:
            return None
        return recovery.summary(args.per_device_train_batch_size, args.gradient_accumulation_steps)


def _obstacle(trainer: Any) -> str | None:
    """Why a step of `trainer` cannot be repeated in parts; None if it can."""
    name = str(getattr(trainer.args, "optimizer_name", getattr(trainer.args.optim, "value", trainer.args.optim)))
    if steps_in_backward(name):
        return f"{name} has already changed weights in the backward pass"
    parallelism = trainer.accelerator.parallelism_config
    is_spread = parallelism is not None and (
        parallelism.tp_enabled or parallelism.cp_enabled or parallelism.sp_enabled
    )
    if is_spread or getattr(trainer, "sp_size", 1) > 1 or trainer.args.n_gpu > 1:
        return "rows or sequences are spread over devices"
    if getattr(getattr(trainer.model, "config", None), "output_router_logits", False):
        return "the router's balancing loss depends on the whole micro-batch"
    owners = [cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls) and cls is not MemoryRecoveryMixin]
    if owners[0] is FastLossMixin:
        if trainer._fast_loss_covers_run and not trainer.log_token_accuracy:
            return None
        owners.pop(0)
    owner = owners[0]
    where = f"{owner.__module__}.{owner.__qualname__}"
    if where == "transformers.trainer.Trainer":
        return None
    if where == "trl.trainer.sft_trainer.SFTTrainer" and trainer.accelerator.num_processes == 1:
        return None if trainer.args.loss_type == "nll" else f"the loss {trainer.args.loss_type} is not additive"
    return f"the loss of {owner.__name__} cannot be computed in parts"
