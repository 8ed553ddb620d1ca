"""One optimizer step of a plain Accelerate loop that is taken only if its loss and gradients are sound."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_scale.training.guard import Guard


@dataclass(frozen=True)
class StepOutcome:
    """What became of one optimizer step; the same on every process.

    Attributes:
        action: ``stepped``; ``skipped`` (nothing has changed, gradients are gone); ``lowered`` (taken at a lower
            learning rate); ``rollback`` (not taken: load the last good checkpoint, `Guard.roll_back`, and go around
            the batch); ``stop`` (not taken: end with `stop_run`).
        loss: Of the global batch, over all its tokens.
        grad_norm: Of the global batch, before clipping; None where the engine has none.
        reason: Why it was not simply taken.
        lr_factor: What the learning rate was multiplied by in this step.
    """

    action: str
    loss: float
    grad_norm: float | None
    reason: str | None = None
    lr_factor: float = 1.0

    @property
    def taken(self) -> bool:
        """Whether the optimizer stepped."""
        return self.action in ("stepped", "lowered")


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
                stop_run(accelerator, outcome)

    The same under every launch: one process, DDP, FSDP2, DeepSpeed's ZeRO stages. Under DeepSpeed do not call
    `accelerator.backward`: it takes the step before anybody can look at the gradients.

    Args:
        accelerator: Accelerate's, after `prepare`.
        model, optimizer: As `prepare` returned them.
        scheduler: Prepared or not; steps once per optimizer step that is taken. None if there is none.
        guard: None takes every step, as an ordinary loop does.
        max_grad_norm: Gradients are clipped to it; None or 0 does not clip.
        output_dir: ``guard_events.jsonl`` is written there; None: the accelerator's `project_dir`.
        first_step: Number of the first step, as a resumed run counts.

    Attributes:
        loss_factor: What a sum over tokens ÷ the global number of tokens is to be multiplied by, because the engine
            averages gradients over the processes.
        step_number: Of the step that is being taken.

    Raises:
        ConfigError: where steps cannot be guarded, or events have nowhere to go.
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
        raise NotImplementedError

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool, row_ids: Sequence[Any] = ()) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients are reduced in the last one of the step only.

        Args:
            row_ids: Names of this process's rows, for the log of events.
        """
        raise NotImplementedError
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of `loss`; gradients of micro-batches add up, those of processes are averaged.

        It is not divided by the number of accumulated micro-batches, unlike in `accelerator.backward`.
        """
        raise NotImplementedError

    def finish(self, loss_sum: torch.Tensor | float | None = None, row_ids: Sequence[Any] = ()) -> StepOutcome:
        """Judge the step and take it, or drop it; gradients are gone afterwards in any case.

        Args:
            loss_sum: This process's share of the global loss: its sum over tokens ÷ the global number of tokens.
                None: what `backward` was given ÷ `loss_factor`.
            row_ids: Names of this process's rows, beside those given to `micro_batch`.
        """
        raise NotImplementedError


def stop_run(accelerator: Any, outcome: StepOutcome, *, program: str = "training") -> None:
    """Say why in one line, once, and end every process with `GUARD_STATUS`; raises `SystemExit`."""
    raise NotImplementedError
