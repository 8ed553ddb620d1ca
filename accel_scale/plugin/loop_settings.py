"""Apply a `ScalePlugin` to a plain loop, and refuse the settings that a plain loop cannot support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accel_scale.plugin.settings import ScaleSettings

_OF_OPTIMIZERS = ("optimizer", "learning_rate", "weight_decay", "scale_lr_from_batch_size")
# Stepped with a metric, which a loop passes only to its own schedule.
_NEED_METRIC = ("reduce_lr_on_plateau", "greedy")


def refuse_in_loops(scale: ScaleSettings) -> None:
    """Refuse settings that the plugin cannot apply in a plain loop."""
    if scale.guard not in (None, "off"):
        raise ConfigError(
            "in a plain loop the guard stands where the optimizer steps, which the plugin does not see.",
            place="ScalePlugin(guard=)",
            fix="remove it, and let accel_scale.GuardedStep take the steps.",
        )
    if scale.lr_schedule in _NEED_METRIC:
        raise ConfigError(
            f"{scale.lr_schedule} follows a metric, which a plain loop hands to a schedule of its own.",
            place="ScalePlugin(lr_schedule=)",
            fix="make it in the script, and remove the field.",
        )


def check_own_accelerator(scale: ScaleSettings, accelerator: Accelerator) -> None:
    """Refuse a script's own `Accelerator` that contradicts the plugin; apply the process-wide settings."""
    refuse_in_loops(scale)
    scale.check_rehearsal(accelerator.num_processes)
    scale.cap_memory(accelerator.device.type, accelerator.device.index or 0)
    precision = scale.resolve_precision(accelerator.device.type, trains_adapters=scale.adapter is not None)
    if precision is not None and accelerator.mixed_precision != precision.mixed_precision:
        raise ConfigError(
            f"the script's Accelerator computes in {accelerator.mixed_precision!r}, precision {scale.precision} in "
            f"{precision.mixed_precision!r}.",
            place="Accelerator(mixed_precision=)",
            fix=f"write {precision.mixed_precision!r} there, or take the plugin's own accelerator().",
        )


def require_parts(
    scale: ScaleSettings, models: Sequence[Any], optimizers: Sequence[Any], schedules: list[Any]
) -> None:
    """Refuse a `prepare` call without the parts that the plugin would change.

    Args:
        models: The models that are trained.
    """
    if not models and not optimizers:
        return
    for name in _OF_OPTIMIZERS:
        if getattr(scale, name) is not None and not optimizers:
            raise _nothing_to_change(name, getattr(scale, name), "optimizer")
    if scale.lr_schedule is not None:
        if not schedules:
            raise _nothing_to_change("lr_schedule", scale.lr_schedule, "learning-rate scheduler")
        if scale.num_training_steps is None:
            raise ConfigError(
                "a plain loop does not say how many optimizer steps it will take.",
                place="ScalePlugin(num_training_steps=)",
                fix="set it.",
            )
        for schedule in schedules:
            if all(schedule.optimizer is not optimizer for optimizer in optimizers):
                raise ConfigError(
                    "a learning-rate scheduler was given without its optimizer.",
                    place="prepare",
                    fix="pass both to the same prepare.",
                )
    if scale.adapter is not None:
        if scale.optimizer is None:
            raise ConfigError(
                "the script's optimizer holds the weights that the adapter freezes.",
                place="ScalePlugin(optimizer=)",
                fix="name an optimizer, e.g. adamw_torch_fused.",
            )
        if len(models) > 1 or len(optimizers) > 1:
            raise ConfigError(
                "it does not say which of several models or optimizers gets the adapter.",
                place="ScalePlugin(adapter=)",
                fix="remove it, and call peft.get_peft_model in the script.",
            )


def _nothing_to_change(name: str, value: object, what: str) -> ConfigError:
    return ConfigError(
        f"{value} has nothing to replace: no {what} was given to prepare.",
        place=f"ScalePlugin({name}=)",
        fix=f"pass the script's {what} to the same prepare as the model.",
    )


def set_accumulation(scale: ScaleSettings, accelerator: Accelerator, loaders: Sequence[Any]) -> int:
    """Derive accumulation from the first data loader ever prepared; returns the global batch in sequences.

    Returns 0 if no data loader has been seen and nothing needs the batch size.
    """
    known = vars(accelerator).get("_scale_global_batch")
    if known is not None:
        return int(known)
    sizes = [loader.batch_size for loader in loaders if getattr(loader, "batch_size", None)]
    if sizes and accelerator.split_batches:
        sizes = [size // accelerator.num_processes for size in sizes]
    micro = scale.micro_batch_size or (sizes[0] if sizes else None)
    if scale.micro_batch_size is not None and sizes and sizes[0] != scale.micro_batch_size:
        raise ConfigError(
            f"micro_batch_size {scale.micro_batch_size} and the data loader's batch of {sizes[0]} differ.",
            place="ScalePlugin(micro_batch_size=)",
            fix="remove it, or make the data loader with it.",
        )
    if micro is None:
        if scale.scale_lr_from_batch_size is not None:
            raise ConfigError(
                "the global batch is not known: no data loader with a batch_size was given to prepare.",
                place="ScalePlugin(scale_lr_from_batch_size=)",
                fix="pass the data loader to the same prepare, or set micro_batch_size.",
            )
        return 0
    accumulation = scale.accumulation(micro, accelerator.num_processes)
    if accumulation is not None:
        if accelerator.gradient_accumulation_steps not in (1, accumulation):
            raise ConfigError(
                f"the script's Accelerator accumulates {accelerator.gradient_accumulation_steps} micro-batches, "
                f"global_batch_size {scale.global_batch_size} means {accumulation}.",
                place="Accelerator(gradient_accumulation_steps=)",
                fix="remove one of them.",
            )
        accelerator.gradient_accumulation_steps = accumulation
    global_batch = micro * accelerator.num_processes * accelerator.gradient_accumulation_steps
    accelerator._scale_global_batch = global_batch
    return int(global_batch)


def check_accumulates(scale: ScaleSettings, accelerator: Accelerator) -> None:
    """Make `accelerator.backward` refuse a loop in which `global_batch_size` has no effect.

    A loop that accumulates, by `accumulate`, `GuardedStep` or `forward_backward`, runs backward passes without
    gradient reduction before the first with one. In other loops every pass reduces and is followed by a step.
    """
    if scale.global_batch_size is None or vars(accelerator).get("_scale_checks_backward"):
        return
    accelerator._scale_checks_backward, has_accumulated = True, False
    backward = accelerator.backward

    def checked(loss: object, **kwargs: object) -> None:
        nonlocal has_accumulated
        state = accelerator.gradient_state
        has_accumulated = has_accumulated or not state.sync_gradients
        place = "ScalePlugin(global_batch_size=)"
        if vars(accelerator).get("_scale_global_batch") is None:
            raise ConfigError(
                "no data loader with a batch_size was given to prepare.",
                place=place,
                fix="pass the data loader to prepare, or set micro_batch_size.",
            )
        if accelerator.gradient_accumulation_steps > 1 and not has_accumulated and not state.end_of_dataloader:
            raise ConfigError(
                f"the loop takes a step with every micro-batch, not with {accelerator.gradient_accumulation_steps}.",
                place=place,
                fix="put the loop's body under `with accelerator.accumulate(model):`.",
            )
        backward(loss, **kwargs)

    accelerator.backward = checked


class ScheduleLength:
    """Warns if a plain loop takes more or fewer steps than its schedule has.

    Args:
        schedule: The schedule, prepared by Accelerate.
        num_steps: Its length in optimizer steps.
        say: Prints one line, on one process.
    """

    def __init__(self, schedule: Any, num_steps: int, *, say: Callable[[str], None]) -> None:
        self._schedule, self._num_steps, self._say, self._is_told = schedule, num_steps, say, False
        step = schedule.step

        def counted(*args: Any, **kwargs: Any) -> None:
            step(*args, **kwargs)
            if self._taken > num_steps and not self._is_told:
                self._is_told = True
                say(
                    f"warning: the schedule of {num_steps} steps has ended, and training continues. "
                    "Fix: set ScalePlugin(num_training_steps=) to the steps that will be taken."
                )

        schedule.step = counted

    @property
    def _taken(self) -> int:
        return int(getattr(self._schedule, "scheduler", self._schedule).last_epoch)

    def end(self) -> None:
        """Call after the last step."""
        if self._taken < self._num_steps:
            self._say(
                f"warning: training has ended after {self._taken} of the schedule's {self._num_steps} steps. "
                "Fix: set ScalePlugin(num_training_steps=) to the steps that will be taken."
            )
