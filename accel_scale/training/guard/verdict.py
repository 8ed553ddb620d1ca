"""Collect the numbers of a step from all processes, let the guard decide, and record the decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.facts.exit_statuses import GUARD_STATUS
from accel_scale.reporting.trackers import TextWriter, send_alert
from accel_scale.training.guard.events import append_event, console_line
from accel_scale.training.guard.guard import Decision, Guard

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class StepOutcome:
    """The result of one optimizer step; the same on every process.

    Attributes:
        action: ``stepped``; ``skipped`` (nothing has changed, gradients are gone); ``lowered`` (taken at a lower
            learning rate); ``rollback`` (not taken: load the last good checkpoint, call `Guard.roll_back`, and leave
            out the batch); ``stop`` (not taken: end with `stop_run`).
        loss: Loss of the global batch, over all its tokens.
        grad_norm: Norm of the global batch's gradients before clipping; None if the engine has none.
        reason: Why the step was not simply taken.
        lr_factor: Factor of the learning rate in this step.
        is_overflow: Not taken because fp16 gradients overflowed: the loss scaler must see the step.
    """

    action: str
    loss: float
    grad_norm: float | None
    reason: str | None = None
    lr_factor: float = 1.0
    is_overflow: bool = False

    @property
    def taken(self) -> bool:
        """True if the optimizer stepped."""
        return self.action in ("stepped", "lowered")


@dataclass
class MicroBatch:
    """Record of one micro-batch of this process until its step is judged."""

    losses: list[torch.Tensor] = field(default_factory=list)
    row_ids: Any = ()


class StepJudge:
    """Collects the numbers of all processes, so that all decide from the same ones; logs steps that are not taken.

    Costs one all-gather of two numbers per optimizer step. Row ids are sent only for an event.

    Args:
        guard: None judges nothing.
        output_dir: Folder for ``guard_events.jsonl``.
        say: Prints one line; called on one process.
        writers: TensorBoard writers that get events as text; by default those of the accelerator's trackers.
    """

    def __init__(
        self,
        accelerator: Any,
        guard: Guard | None,
        output_dir: str | Path,
        *,
        say: Callable[[str], None] | None = None,
        writers: Callable[[], Iterable[TextWriter]] | None = None,
    ) -> None:
        self._accelerator, self._guard, self._output_dir = accelerator, guard, output_dir
        self._say = say or _print_now
        self._writers = writers or self._own_writers

    def judge(
        self,
        loss: torch.Tensor,
        grad_norm: float | None,
        micro_batches: Sequence[MicroBatch],
        *,
        step_number: int,
        loss_factor: float,
        has_loss_scaler: bool,
    ) -> tuple[StepOutcome, Decision]:
        """Decide about the step; call on every process.

        Args:
            loss: This process's share of the global loss × `loss_factor`; the mean over processes is the global loss.
            grad_norm: Norm of the global batch's gradients.
        """
        global_loss, norm = self._everyones(loss, grad_norm)
        decision = (
            Decision("stepped")
            if self._guard is None
            else self._guard.judge(global_loss, norm, has_loss_scaler=has_loss_scaler)
        )
        outcome = StepOutcome(
            decision.action, global_loss, norm, decision.reason, decision.lr_factor, decision.is_overflow
        )
        if decision.is_event:
            self._record(outcome, decision, micro_batches, step_number, loss_factor)
        return outcome, decision

    def _everyones(self, loss: torch.Tensor, grad_norm: float | None) -> tuple[float, float | None]:
        device = self._accelerator.device
        # Norms are equal everywhere except perhaps for the last bit; decisions must agree exactly.
        norm = torch.full((), 0.0 if grad_norm is None else grad_norm, device=device)
        mine = torch.stack([loss.detach().to(device).reshape(()), norm])
        rows = self._accelerator.gather(mine[None]).tolist()
        losses, norms = zip(*rows, strict=True)
        largest = next((value for value in norms if not math.isfinite(value)), max(norms))
        return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else sum(losses), (
            None if grad_norm is None else largest
        )

    def _record(
        self,
        outcome: StepOutcome,
        decision: Decision,
        micro_batches: Sequence[MicroBatch],
        step_number: int,
        loss_factor: float,
    ) -> None:
        from accelerate.utils import gather_object

        rank = self._accelerator.process_index
        mine = [
            {
                "rank": rank,
                "loss": sum(float(loss) for loss in part.losses) / loss_factor,
                "rows": _listed(part.row_ids),
            }
            for part in micro_batches
        ]
        parts = joined(gather_object(mine))
        if not self._accelerator.is_main_process:
            return
        event = {
            "step": step_number,
            "action": outcome.action,
            "reason": outcome.reason,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "loss_threshold": decision.loss_threshold,
            "grad_norm_threshold": decision.grad_norm_threshold,
            "lr_factor": outcome.lr_factor,
            "rows": [row for part in parts for row in part["rows"]],
            "micro_batches": parts,
        }
        append_event(self._output_dir, event)
        line = console_line(event)
        self._say(line)
        title = f"guard: step {step_number}: {outcome.action}"
        text = line.removeprefix("warning: ")
        send_alert(title, text, step=step_number, is_error=outcome.action == "stop", writers=self._writers())

    def _own_writers(self) -> list[TextWriter]:
        trackers = getattr(self._accelerator, "trackers", ())
        return [tracker.writer for tracker in trackers if tracker.name == "tensorboard"]


def joined(micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge micro-batches of ranks that share rows; the losses are of parts of the rows and are added.

    Args:
        micro_batches: ``rank``, ``loss`` and ``rows`` of each, in order of rank.
    """
    found: list[dict[str, Any]] = []
    of_rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in micro_batches:
        rows = tuple(part["rows"])
        first = of_rows.setdefault(rows, part) if rows else part
        if first["rank"] == part["rank"]:  # a rank may draw the same rows again
            found.append(part)
        else:
            first["loss"] += part["loss"]
    return found


def stop_run(accelerator: Accelerator, outcome: StepOutcome, *, program: str = "training") -> None:
    """Print the reason once, and end every process with `GUARD_STATUS`; raises `SystemExit`.

    Call it on every process, with the same outcome.
    """
    from accel_scale.ending.last_word import say_last

    if accelerator.is_main_process:
        say_last(f"{program}: the guard stops the run: {outcome.reason}")
    accelerator.wait_for_everyone()  # the launcher ends the others as soon as one has left
    let_go_of_collectives()
    accelerator.end_training()
    raise SystemExit(GUARD_STATUS)


def _listed(row_ids: Any) -> list[Any]:
    """Ids as a list; tensors, which loaders make from numbers, are read only now."""
    if torch.is_tensor(row_ids):
        return list(row_ids.flatten().tolist())
    return [item for row in row_ids for item in (_listed(row) if torch.is_tensor(row) else [row])]


def _print_now(line: str) -> None:
    print(line, flush=True)
