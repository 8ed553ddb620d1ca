"""Memory and time of real training steps, next to the planner's predictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from accel_scale.facts.optimizer_specs import optimizer_spec
from accel_scale.measuring.storages import StorageTracker
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.settings.planned import RunPlan, sizes_of_answers, with_interval
from accel_scale.units import format_bytes, three_digits

if TYPE_CHECKING:
    from transformers import Trainer


def resident_tensors(model: torch.nn.Module, optimizer: Any = None) -> list[torch.Tensor]:
    """Weights, buffers, and the gradients and optimizer states that exist."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [] if optimizer is None else tree_leaves(list(optimizer.state.values()))
    tensors = [leaf for leaf in states if isinstance(leaf, torch.Tensor)]
    return [*parameters, *model.buffers(), *gradients, *tensors, *quantisation_tensors(parameters)]


def quantisation_tensors(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The scales of 4-bit weights, which are not parameters (bitsandbytes' `QuantState`, nested once)."""
    found = []
    for state in [state for p in parameters if (state := getattr(p, "quant_state", None)) is not None]:
        nested = getattr(state, "state2", None)
        candidates = (state.absmax, state.code, *((nested.absmax, nested.code) if nested is not None else ()))
        found += [tensor for tensor in candidates if isinstance(tensor, torch.Tensor)]
    return found


class StepMemory:
    """Measures the memory of training steps: all steps on CUDA; elsewhere the first step, in a single process only.

    For the first step, the memory reported is what its passes would need with the optimizer states already present. A
    subclass reports when passes and steps begin and end.

    Args:
        owner: Object with current `accelerator`, `model`, `optimizer` and `meter` (`ThroughputMeter`) attributes.
        plan: The prediction; None measures nothing.
    """

    def __init__(self, owner: Any, plan: RunPlan | None) -> None:
        self._owner, self._plan = owner, plan
        device_type = owner.accelerator.device.type
        self._is_cuda = device_type == "cuda"
        self._before = self._peaks = (0, 0)
        # For generated answers: tokens of the longest prompt and of the longest answer.
        self._answers: tuple[int, ...] = (0, 0)
        self._num_positions = 0
        can_trace = device_type == "cpu" and owner.accelerator.num_processes == 1
        is_traced = plan is not None and can_trace and not (plan.setup.compile or plan.setup.parallel.shards_states)
        self._tracker = StorageTracker() if is_traced else None
        self._is_tracing = is_traced

    def _step_ended(self) -> None:
        if self._is_cuda:
            # Loading, generation, evaluation and saving happen between steps; their peaks are not a step's.
            now = _cuda_peaks()
            self._peaks = now if now[0] > self._before[0] or not self._peaks[0] else self._peaks
        self._is_tracing = False

    def _step_begins(self) -> None:
        if self._is_cuda:
            self._before = _cuda_peaks()

    def report(self) -> dict[str, Any]:
        """Predicted and measured values for ``run_summary.json``, and a ``line`` to print; call it on every rank.

        Empty if nothing was planned.

        `compared` holds the predictions for the kernels used here, once for full rows as planned, and once for as
        many positions as the largest micro-batch really had.
        """
        accelerator, meter, plan = self._owner.accelerator, self._owner.meter, self._plan
        if plan is None:
            return {}
        found = [[*self._peaks, self._num_positions, *self._answers]]
        mine = torch.tensor(found, dtype=torch.int64, device=accelerator.device)
        allocated, reserved, positions, *answers = accelerator.gather(mine).amax(0).tolist()
        if plan.setup.generation is not None:
            positions = plan.setup.micro_batch_size * sum(answers)
        measured = {
            "allocated_bytes": allocated or None,
            "reserved_bytes": reserved or None,
            "step_seconds": meter.step_seconds,
            "positions": positions or None,
            "how": "allocator" if self._is_cuda else "first step traced" if self._tracker is not None else None,
        }
        compared = self._compared(plan, positions, answers)
        return {
            **plan.as_dict(),
            "compared": compared,
            "measured": measured,
            "line": comparison_line(compared, measured),
        }

    def _compared(self, plan: RunPlan, positions: int, answers: list[int]) -> dict[str, Any]:
        is_cuda = self._is_cuda
        setup = plan.here or plan.setup
        limit = plan.limit_bytes if is_cuda and plan.target.is_here else None
        full = predict_memory(plan.facts, setup, is_cuda=is_cuda, is_tracked=not is_cuda, limit_bytes=limit)
        rows = setup.micro_batch_size
        seen = replace(setup, sequence_length=max(1, -(-positions // rows))) if positions else setup
        if setup.generation is not None and positions:
            seen = replace(setup, **sizes_of_answers(setup, *answers))
        real = predict_memory(plan.facts, seen, is_cuda=is_cuda, is_tracked=not is_cuda, limit_bytes=limit)
        share = full.least_bytes / full.needed_bytes - 1
        return {
            "planned_bytes": round(full.peak_bytes),
            "interval_bytes": round(share * full.peak_bytes),
            "positions": rows * setup.sequence_length,
            "allocated_bytes": round(real.peak_bytes),
            "reserved_bytes": round(real.reserved_bytes) if is_cuda else None,
            "step_seconds": plan.time.step_seconds if plan.time is not None and plan.target.is_here else None,
        }


class MemoryWatch(StepMemory, TrainerCallback):
    """`StepMemory` for a trainer's steps. It wraps the trainer's own `training_step`, which runs unchanged."""

    def __init__(self, trainer: Any, plan: RunPlan) -> None:
        super().__init__(trainer, plan)
        self._pass_peak = self._before_update = 0
        self._traces_update = self._is_tracing and not optimizer_spec(plan.setup.optimizer).compiles
        self._training_step, trainer.training_step = trainer.training_step, self._watched_step

    def _watched_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._tracker is not None and not self._is_tracing:
            return self._training_step(model, inputs, *args, **kwargs)
        if isinstance(inputs, dict):
            self._num_positions = max(self._num_positions, inputs["input_ids"].numel())
        if self._tracker is None:
            return self._counted(self._training_step(model, inputs, *args, **kwargs))
        self._tracker.adopt(self._resident())
        with self._tracker:
            return self._counted(self._training_step(model, inputs, *args, **kwargs))

    def _resident(self) -> list[torch.Tensor]:
        """Tensors that stay in memory between steps, including a reference model."""
        reference = getattr(self._owner, "ref_model", None)
        held = resident_tensors(self._owner.model, self._owner.optimizer)
        return held if reference is None else [*held, *resident_tensors(reference)]

    def _counted(self, loss: torch.Tensor) -> torch.Tensor:
        """Count the answers that the trainer has generated, and return `loss`."""
        if self._plan is not None and self._plan.setup.generation is not None:
            self._answers = tuple(map(max, self._answers, self._owner.answer_sizes))
        return loss

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._step_begins()

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self._tracker is not None and self._is_tracing:
            self._pass_peak, self._before_update = self._tracker.peak_bytes, self._tracker.live_bytes
            if self._traces_update:
                self._tracker.__enter__()

    def on_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self._tracker is not None and self._is_tracing:
            if self._traces_update:
                self._tracker.__exit__(None, None, None)
            else:
                self._tracker.adopt(self._resident())
            # The first step creates the optimizer states after its passes; later steps have them before.
            made = self._tracker.live_bytes - self._before_update
            self._peaks = (max(self._tracker.peak_bytes, self._pass_peak + made), 0)

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._step_ended()


def watch(trainer: Trainer, plan: RunPlan | None) -> MemoryWatch | None:
    """Measure the steps of `trainer` for `MemoryWatch.report`; returns None without a plan."""
    if plan is None:
        return None
    found = MemoryWatch(trainer, plan)
    trainer.add_callback(found)
    return found


def comparison_line(compared: dict[str, Any], measured: dict[str, Any]) -> str:
    """``memory: predicted 5.21 ± 0.42 GiB, measured 5.02 GiB (+3.8 %); step: predicted 0.41 s, …``.

    If no micro-batch was as long as planned, the prediction for the longest is given too, and is the one compared.
    """
    predicted, found = compared["allocated_bytes"], measured["allocated_bytes"]
    memory = f"memory: predicted {with_interval(compared['planned_bytes'], compared['interval_bytes'])}, "
    if (measured["positions"] or compared["positions"]) < compared["positions"]:
        memory += f"{format_bytes(predicted)} for {measured['positions']:,} of {compared['positions']:,} positions, "
    memory += f"measured {format_bytes(found)} ({_difference(found, predicted)})" if found else "not measured here"
    if measured["reserved_bytes"]:
        reserved = compared["reserved_bytes"]
        memory += (
            f" allocated, predicted {format_bytes(reserved)}, measured {format_bytes(measured['reserved_bytes'])}"
        )
        memory += f" ({_difference(measured['reserved_bytes'], reserved)}) reserved"
    seconds, expected = measured["step_seconds"], compared["step_seconds"]
    if seconds is None:
        return memory
    taken = f"measured {three_digits(seconds)} s"
    if expected is None:
        return f"{memory}; step: {taken}"
    return f"{memory}; step: predicted {three_digits(expected)} s, {taken} ({_difference(seconds, expected)})"


def _difference(measured: float, predicted: float) -> str:
    """The prediction error, in per cent of the measured value."""
    return f"{(predicted - measured) / measured * 100:+.1f} %"


def _cuda_peaks() -> tuple[int, int]:
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
