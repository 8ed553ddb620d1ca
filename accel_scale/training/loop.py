"""A plain Accelerate loop with a `ScalePlugin`: an `Accelerator` whose `prepare` applies it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.launching.begin import begin_process
from accel_scale.launching.leaving import let_go_of_collectives
from accel_scale.training.preparing import (
    adjust_groups,
    prepare_model,
    replace_optimizer,
    step_once_per_update,
    strategy_of,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accel_scale.plugin import ScalePlugin


def make_accelerator(scale: ScalePlugin, kwargs: dict[str, Any]) -> Any:
    """An `Accelerator` for `scale`; `kwargs` are the script's own.

    Raises:
        ConfigError: if the script's arguments and the plugin's contradict each other.
    """
    from accelerate import Accelerator

    from accel_scale.training.batch_splitting import LossKind
    from accel_scale.training.memory_recovery import MemoryRecovery
    from accel_scale.training.precision import enable_fp16_on_cpu
    from accel_scale.training.saving import VerifyResult, save_atomically, verify_checkpoint

    class ScaledAccelerator(Accelerator):
        """`Accelerator` that applies a `ScalePlugin` in `prepare` and saves atomically.

        Attributes:
            memory_recovery: That of `forward_backward`, None before its first call.
            first_verification: What reading the first saved state back gave, None until then.
        """

        first_verification: VerifyResult | None = None
        memory_recovery: MemoryRecovery | None = None

        def forward_backward(self, model: Any, batches: Any, loss_of: Any, *, loss_kind: LossKind = "sum") -> Any:
            """Forward and backward of one optimizer step's micro-batches, again in halves where memory runs out.

            As `MemoryRecovery.step`; the returned loss is the sum over the micro-batches. Its `backward` divides by
            `gradient_accumulation_steps`.
            """
            if self.memory_recovery is None:
                self.memory_recovery = MemoryRecovery(self, model, loss_kind=loss_kind)
            return self.memory_recovery.step(batches, loss_of)

        def end_training(self) -> None:
            if self.memory_recovery is not None:
                self.memory_recovery.close()
            let_go_of_collectives()
            super().end_training()

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            return scale.prepare(self, *args, **kwargs)

        def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
            scale.check_checkpoints()
            if output_dir is None:  # automatic naming: Accelerate also rotates
                return super().save_state(output_dir, *args, **kwargs)
            with save_atomically(output_dir) as staging:
                super().save_state(str(staging), *args, **kwargs)
                if scale.verify_first_checkpoint and self.first_verification is None and len(self._models) == 1:
                    self.wait_for_everyone()
                    self.first_verification = verify_checkpoint(self._models[0], staging)
            return output_dir

    begin_process()
    if scale.guard_settings() is not None:
        raise ConfigError(
            "in a plain loop the guard stands where the optimizer steps, which the plugin does not see.",
            place="ScalePlugin(guard=)",
            fix="remove it, and let accel_scale.GuardedStep take the steps.",
        )
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
    if scale.global_batch_size is not None and kwargs.get("gradient_accumulation_steps") is not None:
        raise ConfigError(
            "gradient_accumulation_steps is derived from global_batch_size.",
            place="Accelerator(gradient_accumulation_steps=)",
            fix="remove one of them.",
        )
    accelerator = ScaledAccelerator(**_with_accumulation(kwargs))
    scale.check_rehearsal(accelerator.num_processes)
    enable_fp16_on_cpu(accelerator)
    scale.cap_memory(accelerator.device.type, accelerator.device.index or 0)
    return accelerator


def _with_accumulation(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`auto` in a DeepSpeed launch file means that the script decides; Accelerate 1.15 fails on the word instead."""
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") != "auto" or "gradient_accumulation_plugin" in kwargs:
        return kwargs
    from accelerate.utils import GradientAccumulationPlugin

    num_steps = kwargs.get("gradient_accumulation_steps", 1)
    others = {name: value for name, value in kwargs.items() if name != "gradient_accumulation_steps"}
    return {**others, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=num_steps)}


def _device_type(kwargs: dict[str, Any]) -> str:
    import torch

    accelerator = None if kwargs.get("cpu") else torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def prepare(scale: ScalePlugin, accelerator: Accelerator, parts: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply `scale` to each of `parts` and let Accelerate prepare them; as many come back, in the same order.

    Raises:
        ConfigError: if something the plugin should replace was not given.
    """
    import torch
    from accelerate import Accelerator
    from torch.optim.lr_scheduler import LRScheduler

    replaced = list(parts)
    where = {
        kind: [index for index, part in enumerate(parts) if isinstance(part, kind)]
        for kind in (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.utils.data.DataLoader)
    }
    models, optimizers, schedulers, loaders = where.values()
    if models:
        _require_parts(scale, optimizers, schedulers)
    global_batch_size = _set_accumulation(scale, accelerator, [parts[index] for index in loaders])
    model = None
    for index in models:
        model = replaced[index] = _prepare_model(scale, accelerator, parts[index])
    for index in optimizers:
        replaced[index] = _prepare_optimizer(scale, accelerator, parts[index], model, global_batch_size)
    if scale.lr_schedule is not None:
        for index in schedulers:
            position = next(i for i in optimizers if parts[i] is parts[index].optimizer)
            replaced[index] = scale.schedule(replaced[position], scale.num_training_steps or 0)
    prepared = Accelerator.prepare(accelerator, *replaced, **kwargs)
    if scale.lr_schedule is not None:
        for index in schedulers:
            step_once_per_update(prepared[index] if isinstance(prepared, (tuple, list)) else prepared)
    return prepared


def _require_parts(scale: ScalePlugin, optimizers: list[int], schedulers: list[int]) -> None:
    wanted = {"optimizer": (scale.optimizer, optimizers), "learning-rate scheduler": (scale.lr_schedule, schedulers)}
    for what, (setting, given) in wanted.items():
        if setting is not None and not given:
            raise ConfigError(
                f"{setting} has nothing to replace: no {what} was given to prepare.",
                place="prepare",
                fix=f"pass the script's {what} to the same prepare as the model.",
            )
    if scale.lr_schedule is not None and scale.num_training_steps is None:
        raise ConfigError(
            "a plain loop does not say how many optimizer steps it will take.",
            place="ScalePlugin(num_training_steps=)",
            fix="set it.",
        )
    if scale.adapter is not None and scale.optimizer is None:
        raise ConfigError(
            "the script's optimizer holds the weights that the adapter freezes.",
            place="ScalePlugin(optimizer=)",
            fix="name an optimizer, e.g. adamw_torch_fused.",
        )


def _set_accumulation(scale: ScalePlugin, accelerator: Any, loaders: list[Any]) -> int:
    """Derive accumulation from the first data loader's batch; returns the global batch in sequences."""
    sizes = [loader.batch_size for loader in loaders if getattr(loader, "batch_size", None)]
    micro = scale.micro_batch_size or (sizes[0] if sizes else None)
    if scale.micro_batch_size is not None and sizes and sizes[0] != scale.micro_batch_size:
        raise ConfigError(
            f"micro_batch_size {scale.micro_batch_size} and the data loader's batch of {sizes[0]} differ.",
            place="ScalePlugin(micro_batch_size=)",
            fix="remove it, or make the data loader with it.",
        )
    if micro is None:
        return scale.global_batch_size or 0
    accumulation = scale.accumulation(micro, accelerator.num_processes)
    if accumulation is not None:
        accelerator.gradient_accumulation_steps = accumulation
    return micro * accelerator.num_processes * accelerator.gradient_accumulation_steps


def _prepare_model(scale: ScalePlugin, accelerator: Any, model: Any) -> Any:
    device_type = accelerator.device.type
    return prepare_model(
        model,
        strategy=strategy_of(accelerator),
        device_type=device_type,
        precision=scale.resolve_precision(device_type, trains_adapters=scale.adapter is not None),
        policy=scale.policy,
        attention=scale.attention,
        adapter=scale.adapter,
    )


def _prepare_optimizer(scale: ScalePlugin, accelerator: Any, optimizer: Any, model: Any, global_batch: int) -> Any:
    if scale.optimizer is not None:
        optimizer = replace_optimizer(
            optimizer,
            model,
            scale.optimizer,
            learning_rate=scale.learning_rate,
            weight_decay=scale.weight_decay,
            optim_args=scale.optim_args,
            device_type=accelerator.device.type,
            strategy=strategy_of(accelerator),
            offload_optimizer=scale.launch.parallel.offload_optimizer != "none",
        )
    elif any(setting is not None for setting in (scale.lr_schedule, scale.learning_rate, scale.weight_decay)):
        adjust_groups(optimizer, learning_rate=scale.learning_rate, weight_decay=scale.weight_decay)
    if scale.scale_lr_from_batch_size is not None:
        for group in optimizer.param_groups:
            group["lr"] = scale.scaled_learning_rate(group["lr"], global_batch)
    return optimizer
