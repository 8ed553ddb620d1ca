"""A `ScalePlugin` in a plain Accelerate loop: an `Accelerator` whose `prepare` applies it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_scale.data.worker_start import refuse_unpicklable
from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.errors import ConfigError
from accel_scale.modeling.precision import enable_fp16_on_cpu
from accel_scale.optimization.batch_splitting import LossKind
from accel_scale.parallel.engine import strategy_of
from accel_scale.plugin.batch_norm import settle_batch_norm
from accel_scale.plugin.field_words import in_words_of_fields
from accel_scale.plugin.loop_settings import (
    ScheduleLength,
    check_accumulates,
    check_own_accelerator,
    refuse_in_loops,
    require_parts,
    set_accumulation,
)
from accel_scale.plugin.preparing import adapt_optimizer, prepare_model, step_once_per_update
from accel_scale.plugin.replacing import schedules_of
from accel_scale.starting.begin import begin_process
from accel_scale.training.checkpoints.folders import run_of
from accel_scale.training.checkpoints.staging import prepare_output_dir, save_atomically
from accel_scale.training.resilience.memory_recovery import REMEDIES, MemoryRecovery
from accel_scale.training.saving.verification import VerifyResult, verify_checkpoint

if TYPE_CHECKING:
    from typing import TypeVarTuple

    from accel_scale.plugin.settings import ScaleSettings

    _Parts = TypeVarTuple("_Parts")

_Part = TypeVar("_Part")


class ScaledAccelerator(Accelerator):
    """`Accelerator` that applies a `ScalePlugin` in `prepare` and saves atomically; see `ScalePlugin.accelerator`.

    Attributes:
        memory_recovery: The `MemoryRecovery` of `forward_backward`; None before its first call.
        first_verification: Result of reading back the first saved state; None until then.
    """

    first_verification: VerifyResult | None = None
    memory_recovery: MemoryRecovery | None = None

    def __init__(self, scale: ScaleSettings, **kwargs: Any) -> None:
        self.scale = scale
        self.schedule_lengths: list[ScheduleLength] = []
        self._cleared: set[Path] = set()
        super().__init__(**kwargs)
        if self.project_dir is not None:
            self._clear_leftovers(self.project_dir)

    def _clear_leftovers(self, folder: str | Path) -> None:
        """Remove the unfinished saves of a killed run, once per run folder; collective."""
        run = run_of(Path(folder).absolute())
        if run not in self._cleared:
            self._cleared.add(run)
            for line in prepare_output_dir(run):
                self.print(f"{run}: {line}")

    def load_state(self, input_dir: str | None = None, *args: object, **kwargs: object) -> Any:
        if input_dir is not None:
            self._clear_leftovers(input_dir)
        return super().load_state(input_dir, *args, **kwargs)

    def forward_backward(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Any]],
        loss_of: Callable[[dict[str, Any]], torch.Tensor],
        *,
        loss_kind: LossKind = "sum",
    ) -> torch.Tensor:
        """Run forward and backward for one optimizer step's micro-batches; retry in halves if memory runs out.

        See `MemoryRecovery.step`. The returned loss is the sum over the micro-batches. Its `backward` divides by
        `gradient_accumulation_steps`.
        """
        if self.memory_recovery is None:
            advice = in_words_of_fields(REMEDIES, self.scale.field_names)
            self.memory_recovery = MemoryRecovery(self, model, loss_kind=loss_kind, advice=lambda level: advice)
        loss: torch.Tensor = self.memory_recovery.step(batches, loss_of)
        return loss

    def end_training(self) -> None:
        if self.memory_recovery is not None:
            self.memory_recovery.close()
        for length in self.schedule_lengths:
            length.end()
        let_go_of_collectives()
        super().end_training()

    @overload
    def prepare(self, part: _Part, /, **kwargs: object) -> _Part: ...

    @overload
    def prepare(self, *parts: *_Parts, **kwargs: object) -> tuple[*_Parts]: ...

    def prepare(self, *args: object, **kwargs: object) -> Any:  # type: ignore[misc]
        with self.scale.in_words_of_fields():
            return prepare(self.scale, self, args, kwargs)

    def save_state(self, output_dir: str | None = None, *args: object, **kwargs: object) -> Any:
        self.scale.check_checkpoints()
        if output_dir is None:  # automatic naming: Accelerate also rotates
            return super().save_state(output_dir, *args, **kwargs)
        self._clear_leftovers(output_dir)
        with self.scale.in_words_of_fields(), save_atomically(output_dir) as staging:
            super().save_state(str(staging), *args, **kwargs)
            if self.scale.verify_first_checkpoint and self.first_verification is None and self._models:
                self.wait_for_everyone()
                self.first_verification = _verify(self._models, Path(staging))
        return output_dir


def _verify(models: Sequence[nn.Module], staging: Path) -> VerifyResult:
    """Read back every prepared model that `Accelerator.save_state` has written, each under its own file names."""
    results = [verify_checkpoint(models[0], staging)]
    for number, model in enumerate(models[1:], 1):
        with tempfile.TemporaryDirectory() as folder:
            for first in ("model.safetensors", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"):
                stem, dot, ending = first.removesuffix("_0").partition(".")
                path = staging / f"{stem}_{number}{dot}{ending}"
                if path.exists():
                    Path(folder, first).symlink_to(path.absolute())
            results.append(verify_checkpoint(model, folder))
    return VerifyResult(
        sum(result.num_tensors for result in results),
        max(result.max_abs_diff for result in results),
        sum(result.seconds for result in results),
        " + ".join(result.source for result in results),
    )


def make_accelerator(scale: ScaleSettings, kwargs: dict[str, Any]) -> ScaledAccelerator:
    """Create an `Accelerator` for `scale`; `kwargs` are the script's own.

    Raises:
        ConfigError: if the script's arguments and the plugin's contradict each other.
    """
    begin_process()
    refuse_in_loops(scale)
    if scale.precision is not None:
        precision = scale.resolve_precision(_device_type(kwargs), trains_adapters=scale.adapter is not None)
        assert precision is not None
        given = kwargs.get("mixed_precision", precision.mixed_precision)
        if given != precision.mixed_precision:
            raise ConfigError(
                f"mixed_precision={given!r} and precision {scale.precision} contradict each other.",
                place="Accelerator(mixed_precision=)",
                fix="remove it; the plugin's precision says it all.",
            )
        kwargs = {**kwargs, "mixed_precision": precision.mixed_precision}
    if scale.global_batch_size is not None:
        for name in ("gradient_accumulation_steps", "gradient_accumulation_plugin"):
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"{name} is derived from global_batch_size.",
                    place=f"Accelerator({name}=)",
                    fix="remove one of them.",
                )
    accelerator = ScaledAccelerator(scale, **_with_accumulation(kwargs))
    scale.check_rehearsal(accelerator.num_processes)
    enable_fp16_on_cpu(accelerator)
    scale.cap_memory(accelerator.device.type, accelerator.device.index or 0)
    return accelerator


def _with_accumulation(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Handle `auto` in a DeepSpeed launch file, which leaves the value to the script; Accelerate 1.15 fails on it."""
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") != "auto" or "gradient_accumulation_plugin" in kwargs:
        return kwargs
    from accelerate.utils import GradientAccumulationPlugin

    num_steps = kwargs.get("gradient_accumulation_steps", 1)
    others = {name: value for name, value in kwargs.items() if name != "gradient_accumulation_steps"}
    return {**others, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=num_steps)}


def _device_type(kwargs: dict[str, Any]) -> str:
    accelerator = None if kwargs.get("cpu") else torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def prepare(scale: ScaleSettings, accelerator: Accelerator, parts: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply `scale` to each of `parts` and let Accelerate prepare them; returns as many parts in the same order.

    Raises:
        ConfigError: if a part that the plugin should replace was not given.
    """
    if not isinstance(accelerator, ScaledAccelerator):
        check_own_accelerator(scale, accelerator)
    models, optimizers = _of(nn.Module, parts), _of(torch.optim.Optimizer, parts)
    schedules, loaders = _of(LRScheduler, parts), _of(DataLoader, parts)
    trained = [model for model in models if any(parameter.requires_grad for parameter in model.parameters())]
    require_parts(scale, trained, optimizers, schedules)
    global_batch_size = set_accumulation(scale, accelerator, loaders)
    check_accumulates(scale, accelerator)
    for loader in loaders:
        refuse_unpicklable(loader, place="DataLoader(num_workers=)")
    moved = {id(optimizer): schedules_of(optimizer, parts) for optimizer in optimizers if scale.moves_rates}
    replaced: dict[int, Any] = {}
    adapter_parameters: list[nn.Parameter] = []
    for model in models:
        known = {id(parameter) for parameter in model.parameters()}
        replaced[id(model)] = _prepare_model(scale, accelerator, model, is_trained=any(m is model for m in trained))
        if scale.adapter is not None:
            new = replaced[id(model)].parameters()
            adapter_parameters += [p for p in new if p.requires_grad and id(p) not in known]
    for optimizer in optimizers:
        replaced[id(optimizer)] = adapt_optimizer(
            scale,
            accelerator,
            optimizer,
            moved.get(id(optimizer), ()),
            models=trained,
            global_batch_size=global_batch_size,
            adapter_parameters=adapter_parameters,
        )
    if scale.lr_schedule is not None:
        for schedule in schedules:
            replaced[id(schedule)] = scale.schedule(replaced[id(schedule.optimizer)], scale.num_training_steps or 0)
    prepared = Accelerator.prepare(accelerator, *(replaced.get(id(part), part) for part in parts), **kwargs)
    if scale.lr_schedule is not None:
        for part, result in zip(parts, prepared if isinstance(prepared, (tuple, list)) else [prepared], strict=True):
            if isinstance(part, LRScheduler):
                step_once_per_update(result)
                length = ScheduleLength(result, scale.num_training_steps or 0, say=accelerator.print)
                if isinstance(accelerator, ScaledAccelerator):
                    accelerator.schedule_lengths.append(length)
    return prepared


def _of(kind: type[_Part], parts: tuple[Any, ...]) -> list[_Part]:
    return [part for part in parts if isinstance(part, kind)]


def _prepare_model(scale: ScaleSettings, accelerator: Accelerator, model: nn.Module, *, is_trained: bool) -> nn.Module:
    device_type = accelerator.device.type
    if is_trained:
        model = settle_batch_norm(
            model,
            sync=bool(scale.sync_batch_norm),
            device_type=device_type,
            num_processes=accelerator.num_processes,
            accumulation=accelerator.gradient_accumulation_steps,
            say=accelerator.print,
        )
    return prepare_model(
        model,
        strategy=strategy_of(accelerator),
        device_type=device_type,
        precision=scale.resolve_precision(device_type, trains_adapters=scale.adapter is not None),
        policy=scale.policy if is_trained else None,
        attention=scale.attention,
        adapter=scale.adapter if is_trained else None,
    )
