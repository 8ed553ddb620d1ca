"""The guard inside HF `Trainer` and every TRL trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import steps_in_backward
from accel_scale.flags.guard import unjudgeable
from accel_scale.flags.guard_settings import GuardSettings
from accel_scale.trainers.tracker_names import text_writers
from accel_scale.training.checkpoints.row_ids import number_rows, take_row_ids
from accel_scale.training.guard.controls import make_gate
from accel_scale.training.guard.guard import Guard
from accel_scale.training.guard.optimizer_control import StepGate
from accel_scale.training.guard.verdict import MicroBatch, StepJudge, StepOutcome, stop_run

if TYPE_CHECKING:
    from torch import nn


class GuardMixin:
    """Put first among a trainer's base classes: bad optimizer steps are not taken.

    Overrides `training_step` and `_get_grad_norm`, which the loop calls once per optimizer step after clipping and
    before `optimizer.step` (checked on transformers 5.23; tests/unit/test_guard_mixin.py fails if that changes).

    Attributes:
        guard_settings: None, or a policy of ``off``, leaves the trainer as it is.
        guard: The guard of the last `train`; None before.
        skipped: Steps not taken in the last `train`, as arguments of `refuse_unlearnt`.
    """

    guard_settings: GuardSettings | None = None
    guard: Guard | None = None
    skipped: Mapping[str, Any] = {}
    _gate: StepGate | None = None
    _judge: StepJudge | None = None

    @property
    def _is_guarded(self) -> bool:
        return self.guard_settings is not None and self.guard_settings.policy != "off"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_guarded:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        check_trainer(trainer, self.guard_settings)
        assert self.guard_settings is not None
        # TRL's trainers that generate and reward: the loss of `GRPOTrainer` and similar is no cost that falls.
        spikes = self.guard_settings.loss_spikes and not hasattr(trainer, "reward_funcs")
        self.guard = Guard(replace(self.guard_settings, loss_spikes=spikes))
        self._judge = StepJudge(
            trainer.accelerator, self.guard, trainer.args.output_dir, writers=lambda: text_writers(trainer)
        )
        self._parts: list[MicroBatch] = []
        self._row_ids: list[Any] = []
        self._judged_steps, self._logged_steps, self._logged_drops, self._dropped_loss = 0, 0, 0, 0.0
        self.skipped = {}
        trainer.add_callback(GuardState())
        try:
            output = super().train(*args, **kwargs)  # type: ignore[misc]
            return output._replace(training_loss=output.metrics["train_loss"])
        except _Stop as stop:
            stop_run(trainer.accelerator, stop.outcome, program=Path(sys.argv[0]).name or "training")
        finally:
            trainer.remove_callback(GuardState)
            if self._gate is not None:
                self._gate.detach()
                self._gate = None

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if self._is_guarded:
            number_rows(loader)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self._is_guarded:
            self._row_ids = [take_row_ids(batch) for batch in batches]
        return batches, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        training_step = super().training_step  # type: ignore[misc]
        if not self._is_guarded:
            return training_step(model, inputs, num_items_in_batch)
        trainer: Any = self
        if self._gate is None or self._gate.optimizer is not trainer.optimizer:
            self._start(model)
        if not self._parts:
            self._logged_before: torch.Tensor = trainer._tr_loss.clone()
        row_ids = self._row_ids.pop(0) if self._row_ids else ()
        loss: torch.Tensor = training_step(model, inputs, num_items_in_batch)
        self._parts.append(MicroBatch([loss.detach()], row_ids))
        return loss

    def _start(self, model: nn.Module) -> None:
        """Start the gate; by now everything is prepared and a checkpoint's state is loaded."""
        trainer: Any = self
        assert self.guard is not None
        if self._gate is not None:  # `auto_find_batch_size` has started over
            self._gate.detach()
        self._gate = make_gate(trainer.accelerator, model, trainer.optimizer)
        self._gate.attach()
        self._parts = []
        saved = trainer.state.stateful_callbacks.get(GuardState.__name__)
        if saved:
            self.guard.load_state_dict(saved["attributes"]["guard_state"])
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, GuardState):  # the trainer may have recreated it from the checkpoint
                callback.guard = self.guard

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        if not self._is_guarded:
            return norm
        trainer: Any = self
        assert self._gate is not None
        assert self._judge is not None
        parts, self._parts = self._parts, []
        outcome, decision = self._judge.judge(
            torch.stack([loss for part in parts for loss in part.losses]).sum(),
            None if norm is None else float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
            parts,
            step_number=trainer.state.global_step + 1,
            loss_factor=trainer.accelerator.num_processes,
            has_loss_scaler=self._gate.has_loss_scaler,
        )
        if outcome.action == "stop":
            raise _Stop(outcome)
        self._judged_steps += 1
        self._logged_steps += 1
        is_dropped = decision.is_event and not outcome.taken
        self.skipped = {
            "num_skipped": self.skipped.get("num_skipped", 0) + is_dropped,
            "skipped_at_end": self.skipped.get("skipped_at_end", 0) + 1 if is_dropped else 0,
            "why_skipped": outcome.reason or "",
        }
        if is_dropped:
            self._logged_drops += 1
            self._dropped_loss = outcome.loss
            trainer._tr_loss.copy_(self._logged_before)  # a sum that contains NaN stays NaN
        self._gate.holds_back = not outcome.taken and not decision.is_overflow
        self._gate.lr_factor = outcome.lr_factor
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the loss of the steps taken and the number of steps not taken; if none was taken, the loss of those."""
        if "loss" in logs and self._is_guarded and self._logged_steps:
            taken = self._logged_steps - self._logged_drops
            if self._logged_drops:
                logs["skipped_steps"] = self._logged_drops
                logs["loss"] = logs["loss"] * self._logged_steps / taken if taken else self._dropped_loss
            self._logged_steps, self._logged_drops = 0, 0
        dropped = self.skipped.get("num_skipped", 0)
        if "train_loss" in logs and self._is_guarded and dropped < self._judged_steps:
            logs["train_loss"] *= self._judged_steps / (self._judged_steps - dropped)  # mean over the steps taken
        super().log(logs, start_time)  # type: ignore[misc]

    def guard_summary(self) -> dict[str, Any] | None:
        """For the run's summary; None if the run was not guarded."""
        if self.guard is None:
            return None
        return {"policy": self.guard.settings.policy, "events": self.guard.num_events}


def check_trainer(trainer: Any, settings: GuardSettings | None) -> None:
    """Refuse settings that a trainer does not support.

    Raises:
        ConfigError: for a policy that a trainer cannot follow, or an optimizer that steps in the backward pass.
    """
    if settings is not None and settings.policy == "rollback":
        raise ConfigError(
            "a trainer's loop cannot go back to a checkpoint while it runs.",
            place="--guard rollback",
            fix="use skip, lower_lr or stop here; recipes/pretrain.py and loops with GuardedStep can roll back.",
        )
    name = str(getattr(trainer.args, "optimizer_name", getattr(trainer.args.optim, "value", trainer.args.optim)))
    if steps_in_backward(name):
        raise unjudgeable(name)


class GuardState(TrainerCallback, ExportableState):
    """Stores the guard's state in ``trainer_state.json`` of every checkpoint."""

    def __init__(self) -> None:
        self.guard: Guard | None = None
        self.guard_state: dict[str, Any] = Guard().state_dict()

    def state(self) -> dict[str, Any]:
        """The state, in the form that `ExportableState` requires."""
        if self.guard is not None:
            self.guard_state = self.guard.state_dict()
        return {"args": {}, "attributes": {"guard_state": self.guard_state}}


class _Stop(Exception):
    """Leaves the trainer's loop, which cleans up after itself."""

    def __init__(self, outcome: StepOutcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome
