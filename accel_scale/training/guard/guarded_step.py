"""One optimizer step of a plain Accelerate loop that is taken only if its loss and gradients are sound."""

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
    """Micro-batches, clipping, optimizer and schedule of one optimizer step after the other.

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

    The same under every launch: one process, DDP, FSDP2, DeepSpeed's ZeRO stages. Under DeepSpeed do not call
    `accelerator.backward`: it takes the step before anybody can look at the gradients.

    Args:
        accelerator: Accelerate's, after `prepare`.
        model, optimizer: As `prepare` returned them.
        scheduler: Prepared or not; its `step` is called once per optimizer step that is taken. None if there is none.
        guard: None takes every step, as an ordinary loop does.
        max_grad_norm: Gradients are clipped to it, also where a DeepSpeed launch file says otherwise; None or 0 does
            not clip.
        output_dir: ``guard_events.jsonl`` is written there; None: the accelerator's `project_dir`.
        first_step: Number of the first step, as a resumed run counts.

    Attributes:
        loss_factor: What a sum over tokens ÷ the global number of tokens is to be multiplied by, because the engine
            averages gradients over the processes.
        step_number: Of the step that is being taken, for the log; one more after each `finish`. A loop in which
            steps that are not taken do not count assigns its own.

    Raises:
        ConfigError: where steps cannot be skipped, or events have nowhere to go.
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
        # Ranks whose gradients the engine averages; those that share one row's computation are not among them.
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
        """Around forward and backward of one micro-batch: gradients are reduced in the last one of the step only.

        Args:
            row_ids: Names of this process's rows, for the log of events; texts, numbers or a tensor of them.
        """
        self._parts.append(MicroBatch(row_ids=row_ids))
        self._is_complete = is_last
        with self._gate.micro_batch(is_last=is_last):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of `loss`; gradients of micro-batches add up, those of processes are averaged.

        It is not divided by the number of accumulated micro-batches, unlike in `accelerator.backward`. Call it inside
        of `micro_batch`.
        """
        self._parts[-1].losses.append(loss.detach())
        self._gate.backward(loss)

    def record(self, losses: Sequence[torch.Tensor], row_ids: Sequence[Sequence[Any]]) -> None:
        """Micro-batches whose passes a pipeline has run: losses (not × `loss_factor`) where it has them, rows."""
        self._gate.accelerator.sync_gradients = True
        for index, ids in enumerate(row_ids):
            self._parts.append(MicroBatch([losses[index].detach() * self.loss_factor] if losses else [], ids))
        self._is_complete = True

    def discard(self) -> None:
        """Forget the micro-batches so far: the step is taken again from its first one."""
        self._parts, self._is_complete = [], False

    def stop(self, outcome: StepOutcome) -> None:
        """Say why in one line, once, and end every process with status 65; call it on all of them."""
        stop_run(self._accelerator, outcome)

    def clip(self) -> float | None:
        """Clip the gradients of the global batch to `max_grad_norm`; their norm before, None where there is none."""
        if not self._is_complete:
            raise RuntimeError("finish comes after the micro-batch with is_last=True, whose gradients are reduced")
        return self._gate.clip(self._max_grad_norm)

    def judge(
        self,
        grad_norm: float | None,
        loss_sum: torch.Tensor | float | None = None,
        row_ids: Sequence[Any] = (),
    ) -> StepOutcome:
        """Decide about the step, from the loss and the norm that `clip` returned; `optimizer_step` comes next.

        Args:
            loss_sum: This process's share of the global loss: its sum over tokens ÷ the global number of tokens.
                None: what `backward` was given ÷ `loss_factor`.
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
        """Take the step where `outcome` says so, else drop it; gradients are gone afterwards in any case.

        Returns:
            Whether the weights have changed, so that the schedule is to step too.
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
        """`clip`, `judge`, `optimizer_step` and the schedule's step in one; arguments are those of `judge`."""
        outcome = self.judge(self.clip(), loss_sum, row_ids)
        if self.optimizer_step(outcome) and self._scheduler is not None:
            self._scheduler.step()
        return outcome
