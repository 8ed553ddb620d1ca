"""Out of memory in a training step: every process discards it, halves its micro-batches and repeats it.

One optimizer step is a transaction. A process that runs out of memory frees what it can and, under DDP, makes the
collective calls that the others still wait for (`unfinished_collectives`), so that none hangs. Before the optimizer
steps, the processes exchange one number over gloo, on the host. That happens once per optimizer step and waits for no
GPU: an allocation fails on the host, so a process knows without asking its device. If any process failed, all repeat
the step with the same samples in parts half as large (`batch_splitting`), and keep that size for the rest of the run.

If the missing collectives are not known (FSDP2, ZeRO, or memory that ran out inside a collective), every process ends
with status `OUT_OF_MEMORY_STATUS` and one line that names flags to continue with (`clean_stop`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from traceback import extract_tb
from typing import Any

import torch
import torch.distributed as dist

from accel_scale.ending.clean_stop import CleanStop
from accel_scale.ending.out_of_memory import REMEDIES, STATE_REMEDIES, is_in_collective, is_out_of_memory, reason_in
from accel_scale.optimization.batch_splitting import LossKind, Part, halve, num_rows, split
from accel_scale.parallel.engine import strategy_of
from accel_scale.training.resilience.unfinished_collectives import (
    CannotFinish,
    Collectives,
    UnknownCollectives,
    collectives_of,
)

Pass = Callable[[Part], torch.Tensor]  # forward and backward of a part
_OPTIMIZER_SOURCE = re.compile(r"accelerate/optimizer\.py$|/torch/optim/")
_LOST_GROUP = "it ran out in the buffers of a collective, whose group is lost with it"
_FINE, _FAILED, _CANNOT_SPLIT = 0, 1, 2


class MemoryRecovery:
    """Runs the micro-batches of optimizer steps, and repeats a step in smaller parts if memory runs out.

    In your own loop, `step` does everything:

        recovery = MemoryRecovery(accelerator, model)
        for batches in steps:  # the micro-batches of one optimizer step
            num_items = count_of_labelled_tokens(batches)
            recovery.step(batches, lambda batch: summed_loss(model, batch) / num_items)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
        recovery.close()

    Args:
        accelerator: The `Accelerator`, after `prepare`.
        model: As returned by `prepare`.
        loss_kind: ``sum`` if the losses of a micro-batch's parts add up to its own; ``token_mean`` or ``row_mean`` if
            it is a mean over its labelled tokens or its rows.
        obstacle: Why a step cannot be repeated in parts, if it cannot; all processes then stop instead.
        advice: Returns the flags to name in the last line when the run has to stop, by `level`.
        recompute_more: Makes the backward pass recompute every layer; tried first, once, on every process.
        on_discard: Called on every process before a step is repeated.
        on_out_of_memory: Called with the step's number where memory ran out, before anything is freed.
        first_step: Number of the first step in a resumed run.
        program: Start of the last line.
        say: Prints one line; called on rank 0 only.

    Attributes:
        level: Number of times that micro-batches have been halved.
        recovered_steps: Numbers, from 1, of the optimizer steps that were repeated.
        step_number: Number of the current step; a loop in which not every step counts assigns its own.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        *,
        loss_kind: LossKind = "sum",
        obstacle: str | None = None,
        advice: Callable[[int], str] | None = None,
        recompute_more: Callable[[], None] | None = None,
        on_discard: Callable[[], None] | None = None,
        on_out_of_memory: Callable[[int], object] | None = None,
        first_step: int = 1,
        program: str = "training",
        say: Callable[[str], None] = print,
    ) -> None:
        self.level = 0
        self.recovered_steps: list[int] = []
        self._accelerator, self._model, self._loss_kind = accelerator, model, loss_kind
        self._obstacle, self._advice, self._on_discard, self._say = obstacle, advice, on_discard, say
        self._on_out_of_memory, self._recompute_more = on_out_of_memory, recompute_more
        self._strategy = strategy_of(accelerator)
        self._collectives: Collectives = collectives_of(model, strategy=self._strategy)
        self._is_alone = accelerator.num_processes == 1
        agrees = not (self._is_alone or obstacle or isinstance(self._collectives, UnknownCollectives))
        # A separate group: the message must not be matched with a gradient.
        self._group = dist.new_group(backend="gloo") if agrees else None
        self._stop = CleanStop(program)
        self._stop.watch()
        self.step_number = first_step
        self._failed_rank = accelerator.process_index
        self._seen: list[Any] = []
        self._verdict = _FINE
        self._returned: torch.Tensor | float = 0.0

    def close(self) -> None:
        """End the watching thread; call after the last step, before the process group is destroyed."""
        self._stop.close()

    def __enter__(self) -> MemoryRecovery:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Around a whole loop, running out of memory anywhere else stops every process with one line."""
        try:
            if isinstance(error, Exception) and is_out_of_memory(error):
                self.stop_run(error)
        finally:
            self.close()

    def summary(self, micro_batch_size: int, accumulation: int) -> dict[str, object] | None:
        """For the run's summary: the repeated steps and the size of passes; None if no step was repeated."""
        if not self.recovered_steps:
            return None
        passes = 2**self.level
        return {
            "recovered_steps": self.recovered_steps,
            "passes_per_micro_batch": passes,
            "rows_per_pass": -(-micro_batch_size // passes),
            "passes_per_step": accumulation * passes,
        }

    def step(self, batches: Sequence[Mapping[str, Any]], loss_of: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
        """Run forward and backward for one optimizer step's micro-batches; gradients are reduced at the end.

        Args:
            batches: Each a mapping with one entry per row in every tensor, or one row of packed documents. Every
                process must have the same number.
            loss_of: Returns the loss of a part, see `loss_kind`; it makes no collective calls besides the model's own.

        Returns:
            The sum of the micro-batches' losses, detached.
        """

        def run(part: Part) -> torch.Tensor:
            loss = loss_of(part.inputs) * part.factor
            self._accelerator.backward(loss)
            return loss.detach()

        last = len(batches) - 1
        losses = [self.micro_batch(batch, run, is_last=index == last) for index, batch in enumerate(batches)]
        return sum(losses)

    def micro_batch(self, inputs: object, run: Pass, *, is_last: bool) -> torch.Tensor | float:
        """Run one micro-batch of an optimizer step; call it for each of them, in order.

        Args:
            inputs: As for `step`; inputs of another type are used unchanged and cannot be split into parts.
            run: Forward and backward of a part; returns its loss times its factor.
            is_last: True for the step's last micro-batch. The processes then agree, and the step is repeated if any
                ran out of memory.

        Returns:
            Its loss. The losses returned for a step add up to the loss of the passes that counted.
        """
        self._seen.append(inputs)
        loss = self._run_parts(inputs, run, is_last=is_last)
        if is_last:
            while self._agree():
                self._restart()
                last = len(self._seen) - 1
                losses = [self._run_parts(x, run, is_last=i == last) for i, x in enumerate(self._seen)]
                loss = sum(losses) - self._returned
            self._seen, self._returned = [], 0.0
            self.step_number += 1
        else:
            self._returned = self._returned + loss
        return loss

    def _run_parts(self, inputs: object, run: Pass, *, is_last: bool) -> torch.Tensor | float:
        parts = split(inputs, self.level, loss_kind=self._loss_kind)
        total: torch.Tensor | float = 0.0
        for index, part in enumerate(parts):
            is_last_pass = is_last and index == len(parts) - 1
            with self._reduction(is_last_pass):
                self._collectives.before_pass()
                loss = self._attempt(part, run)
            if loss is not None and part.factor:
                total = total + loss
        return total

    def _reduction(self, is_last_pass: bool) -> AbstractContextManager[Any]:
        """Reduce gradients only in the step's last pass."""
        self._accelerator.sync_gradients = is_last_pass
        if self._strategy.is_deepspeed or self._strategy.is_model_parallel:  # these decide by themselves
            return nullcontext()
        every_batch = self._accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return nullcontext() if is_last_pass or every_batch else self._accelerator.no_sync(self._model)

    def _attempt(self, part: Part, run: Pass) -> Any:
        """The loss of a pass; None if memory ran out in it."""
        try:
            return run(part)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._tell(self.step_number)
            text, group_is_lost = reason_in(error), is_in_collective(error)
        # Only outside the handler does nothing refer to the pass's activations any more.
        problem = _LOST_GROUP if group_is_lost else self._finish_collectives()
        if problem is not None:
            self._stop.stop(self._stop_line(text, problem))
        can_go_on = self._recompute_more is not None or halve(part.inputs)
        self._verdict = max(self._verdict, _FAILED if can_go_on else _CANNOT_SPLIT)
        return None

    def _tell(self, step: int) -> None:
        if self._on_out_of_memory is not None:
            self._on_out_of_memory(step)

    def _finish_collectives(self) -> str | None:
        """Return why the processes cannot be brought back into step; None if they have been."""
        _free_memory()
        if self._obstacle and not self._is_alone:
            return self._obstacle
        try:
            self._collectives.finish()
        except CannotFinish as reason:
            return str(reason)
        except Exception as error:  # the state of the collectives is unknown
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return None

    def _agree(self) -> bool:
        """True if any process failed; the same on all. Ends the run if the step cannot be repeated."""
        rank = self._accelerator.process_index
        news = torch.tensor([self._verdict * self._accelerator.num_processes + rank if self._verdict else 0])
        if self._group is not None:
            dist.all_reduce(news, op=dist.ReduceOp.MAX, group=self._group)
        self._verdict, self._failed_rank = divmod(int(news), self._accelerator.num_processes)
        if self._verdict == _CANNOT_SPLIT or (self._verdict and self._obstacle):
            what = self._obstacle or "a pass of one row, or one packed document, cannot be halved"
            self._stop.stop(self._stop_line(None, what))
        return self._verdict != _FINE

    def _restart(self) -> None:
        self._verdict = _FINE
        self._model.zero_grad()
        _free_memory()
        if self._on_discard is not None:
            self._on_discard()
        if not self.recovered_steps or self.recovered_steps[-1] != self.step_number:
            self.recovered_steps.append(self.step_number)
        failure = f"warning: memory ran out in step {self.step_number} on rank {self._failed_rank}; the step is taken"
        if self._recompute_more is not None:
            self._recompute_more()
            self._recompute_more = None
            if self._accelerator.is_main_process:
                self._say(f"{failure} again, from here on with --checkpointing_policy full.")
            return
        self.level += 1
        if self._accelerator.is_main_process:
            pieces = 2**self.level
            rows = num_rows(self._seen[0])
            size = f"{-(-rows // pieces)} of its {rows} rows" if rows > 1 else f"1/{pieces} of its packed documents"
            self._say(
                f"{failure} again, from here on each pass has {size}: {pieces} passes per micro-batch, the same "
                "global batch."
            )

    def stop_run(self, error: BaseException, *, words: Callable[[str], str] = str) -> None:
        """End every process after memory ran out where nothing can be repeated (`error`); does not return.

        The optimizer's first step allocates its states; halfway through it, only some of the weights are new.

        Args:
            words: Converts advice, which names flags, into the user's spelling.
        """
        in_step = any(_OPTIMIZER_SOURCE.search(frame.filename) for frame in extract_tb(error.__traceback__))
        where = (
            f"in the optimizer's step {self.step_number - 1}"
            if in_step
            else "outside of the passes that can be taken again"
        )
        self._tell(self.step_number - in_step)
        rank, fix = self._accelerator.process_index, words(STATE_REMEDIES if in_step else REMEDIES)
        self._stop.stop(f"memory ran out {where} on rank {rank} ({reason_in(error)}). Fix: {fix}.")

    def _stop_line(self, text: str | None, reason: str) -> str:
        rank = self._failed_rank if text is None else self._accelerator.process_index
        said = f" ({text})" if text else ""
        return (
            f"memory ran out in step {self.step_number} on rank {rank}{said} and training cannot continue in place: "
            f"{reason}. Fix: {self._advice(self.level) if self._advice else REMEDIES}."
        )


def _free_memory() -> None:
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)
