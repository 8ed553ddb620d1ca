"""One optimizer step of a plain Accelerate loop, taken only if its loss and gradients are sound."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_scale.errors import ConfigError
from accel_scale.parallel.model_parallel import model_parallel_of
from accel_scale.training.guard.controls import make_gate
from accel_scale.training.guard.guard import Guard
from accel_scale.training.guard.verdict import MicroBatch, StepJudge, StepOutcome, stop_run
from accel_scale.training.resilience.hang_watch import follow_steps

__all__ = ["GuardedStep", "StepOutcome", "stop_run"]


class GuardedStep:
    """Runs micro-batches, clipping, optimizer and schedule of successive optimizer steps.

        step = GuardedStep(accelerator, model, optimizer, scheduler, guard=Guard(GuardSettings()), output_dir=folder)
        for micro_batches in steps:
            num_tokens = labelled tokens of these micro-batches on all processes
            for index, batch in enumerate(micro_batches):
                with step.micro_batch(is_last=index == len(micro_batches) - 1, row_ids=batch["ids"]):
                    loss = summed_loss(model, batch) / num_tokens * step.loss_factor
                    step.backward(loss)
            outcome = step.finish()
            if outcome.action == "stop":
                step.stop(outcome)

    Works the same under every launch: one process, DDP, FSDP2, DeepSpeed's ZeRO stages. Under DeepSpeed do not call
    `accelerator.backward`: it takes the step before the gradients can be checked.

    Args:
        accelerator: The `Accelerator`, after `prepare`.
        model, optimizer: As returned by `prepare`.
        scheduler: Prepared or not; its `step` is called once per optimizer step taken. None if there is none.
        guard: None takes every step, as an ordinary loop does.
        max_grad_norm: Clip gradients to this norm, even if a DeepSpeed launch file says otherwise; None or 0 does not
            clip.
        output_dir: Folder for ``guard_events.jsonl``; None uses the accelerator's `project_dir`.
        first_step: Number of the first step in a resumed run.

    Attributes:
        loss_factor: Multiply a sum over tokens ÷ the global number of tokens by it, because the engine averages
            gradients over the processes.
        step_number: Number of the current step, for the log; each `finish` adds one. A loop in which steps that are
            not taken do not count assigns its own.

    Raises:
        ConfigError: if steps cannot be skipped, or there is no folder for events.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        *,
        guard: Guard | None = None,
        max_grad_norm: float | None = 1.0,
        output_dir: str | Path | None = None,
        first_step: int = 1,
    ) -> None:
        folder = output_dir or accelerator.project_dir
        if guard is not None and not folder:
            raise ConfigError(
                "the guard's events have nowhere to go.",
                place="GuardedStep(output_dir=)",
                fix="name the run's folder, or give the Accelerator a project_dir.",
            )
        self._shared = model_parallel_of(accelerator)
        # Ranks whose gradients the engine averages; ranks that share one row's computation count once.
        self.loss_factor = self._shared.layout.gradient_ranks if self._shared else accelerator.num_processes
        self.step_number = first_step
        self._accelerator, self._scheduler, self._optimizer = accelerator, scheduler, optimizer
        self._max_grad_norm = max_grad_norm
        self._gate = make_gate(accelerator, model, optimizer)
        self._judge = StepJudge(accelerator, guard, folder or "")
        self._parts: list[MicroBatch] = []
        self._is_complete = False
        this = weakref.ref(self)  # the watch must not keep the model alive
        follow_steps(lambda: step.step_number if (step := this()) is not None else 0)

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool, row_ids: Sequence[Any] = ()) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch; gradients are reduced only in the step's last one.

        Args:
            row_ids: Names of this process's rows, for the event log; strings, numbers or a tensor of numbers.
        """
        self._parts.append(MicroBatch(row_ids=row_ids))
        self._is_complete = is_last
        with self._gate.micro_batch(is_last=is_last):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of `loss`; gradients add up over micro-batches and are averaged over processes.

        Unlike `accelerator.backward`, it does not divide by the number of accumulated micro-batches. Call it inside
        `micro_batch`.
        """
        self._parts[-1].losses.append(loss.detach())
        self._gate.backward(loss)

    def record(self, losses: Sequence[torch.Tensor], row_ids: Sequence[Sequence[Any]]) -> None:
        """Record micro-batches run by a pipeline: losses (not × `loss_factor`), if this stage has them, and rows."""
        self._gate.accelerator.sync_gradients = True
        for index, ids in enumerate(row_ids):
            self._parts.append(MicroBatch([losses[index].detach() * self.loss_factor] if losses else [], ids))
        self._is_complete = True

    def discard(self) -> None:
        """Forget the micro-batches so far: the step is repeated from its first one."""
        self._parts, self._is_complete = [], False

    def stop(self, outcome: StepOutcome) -> None:
        """Print the reason once, and end every process with status 65; call it on all of them."""
        stop_run(self._accelerator, outcome)

    def clip(self) -> float | None:
        """Clip the global batch's gradients to `max_grad_norm`; returns the norm before, None if there is none."""
        if not self._is_complete:
            raise RuntimeError("finish comes after the micro-batch with is_last=True, whose gradients are reduced")
        return self._gate.clip(self._max_grad_norm)

    def judge(
        self,
        grad_norm: float | None,
        loss_sum: torch.Tensor | float | None = None,
        row_ids: Sequence[Any] = (),
    ) -> StepOutcome:
        """Decide about the step from the loss and the norm returned by `clip`; call `optimizer_step` next.

        Args:
            loss_sum: This process's share of the global loss: its sum over tokens ÷ the global number of tokens. None
                uses the losses given to `backward` ÷ `loss_factor`.
            row_ids: Names of this process's rows, if not given to `micro_batch`.
        """
        parts, self._parts, self._is_complete = self._parts, [], False
        if loss_sum is None:
            values = [value.float() for part in parts for value in part.losses]
            loss = torch.stack(values).sum() if values else torch.zeros(())
        else:
            loss = torch.as_tensor(loss_sum, dtype=torch.float32) * self.loss_factor
        if len(row_ids):
            losses = [value for part in parts for value in part.losses]
            named = any(len(part.row_ids) for part in parts)
            parts = [*parts, MicroBatch(row_ids=row_ids)] if named else [MicroBatch(losses, row_ids)]
        if self._shared is not None:
            loss = loss * self._shared.layout.pp  # the mean over ranks counts stages that have no loss
            parts = parts if self._shared.speaks_for_rows else []
        outcome, _ = self._judge.judge(
            loss,
            grad_norm,
            parts,
            step_number=self.step_number,
            loss_factor=self.loss_factor,
            has_loss_scaler=self._gate.has_loss_scaler,
        )
        return outcome

    def optimizer_step(self, outcome: StepOutcome) -> bool:
        """Take or drop the step, as `outcome` says; the gradients are freed in either case.

        Returns:
            True if the weights have changed and the schedule must step too.
        """
        self.step_number += 1
        if not (outcome.taken or outcome.is_overflow):
            self._gate.drop()
            return False
        self._gate.take(outcome.lr_factor)
        has_stepped = not self._optimizer.step_was_skipped
        self._gate.zero_grad()
        return has_stepped

    def finish(self, loss_sum: torch.Tensor | float | None = None, row_ids: Sequence[Any] = ()) -> StepOutcome:
        """Run `clip`, `judge`, `optimizer_step` and the schedule's step; takes the arguments of `judge`."""
        outcome = self.judge(self.clip(), loss_sum, row_ids)
        if self.optimizer_step(outcome) and self._scheduler is not None:
            self._scheduler.step()
        return outcome
