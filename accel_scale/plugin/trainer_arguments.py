"""Apply a `ScalePlugin` to a script's `TrainingArguments`, and recompute the values derived from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.secrets import move_token_to_environment

if TYPE_CHECKING:
    from accel_scale.modeling.precision import Precision
    from accel_scale.plugin.settings import ScaleSettings


def adapt_arguments(scale: ScaleSettings, arguments: Any) -> Precision | None:
    """Apply the settings that must be known before a trainer creates its `Accelerator`.

    Returns:
        The precision that plugin, launch and device agree on; None if the plugin leaves it to the script.

    Raises:
        ConfigError: for a setting that cannot be applied to the arguments.
    """
    move_token_to_environment(arguments)
    scale.check_rehearsal(arguments.world_size)
    if arguments.save_strategy != "no":
        scale.check_checkpoints()
    device_type = arguments.device.type
    precision = scale.resolve_precision(device_type, trains_adapters=scale.adapter is not None)
    if precision is not None:
        arguments.mixed_precision = precision.mixed_precision
        for flag, value in precision.trainer_flags.items():
            setattr(arguments, flag, value)
        if arguments.deepspeed_plugin is not None:
            arguments.deepspeed_plugin.set_mixed_precision(precision.mixed_precision)
    elif arguments.deepspeed_plugin is not None:
        # Without a plugin precision the launch's applies, as transformers does under every other strategy.
        for name in ("bf16", "fp16"):
            setattr(arguments, name, arguments.mixed_precision == name)
    if scale.policy is not None:  # ours, applied once, in place of the trainer's
        arguments.activation_checkpointing = False
    _set_batch(scale, arguments)
    scale.cap_memory(device_type, arguments.device.index or 0)
    if scale.weight_decay is not None:
        arguments.weight_decay = scale.weight_decay
    if scale.learning_rate is not None:
        arguments.learning_rate = scale.learning_rate
    if scale.scale_lr_from_batch_size is not None:
        arguments.learning_rate *= scale.learning_rate_factor(
            arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        )
    if arguments.deepspeed:  # its "auto" entries have been filled with the script's values
        _read_deepspeed_again(arguments)
    return precision


def _set_batch(scale: ScaleSettings, arguments: Any) -> None:
    before = (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
    if scale.micro_batch_size is not None:
        arguments.per_device_train_batch_size = scale.micro_batch_size
    accumulation = scale.accumulation(arguments.per_device_train_batch_size, arguments.world_size)
    if accumulation is not None:
        arguments.gradient_accumulation_steps = accumulation
    if before != (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps):
        _derive_generation_batch(arguments, before[1])


def _derive_generation_batch(arguments: Any, old_accumulation: int) -> None:
    """Recompute the values that TRL's online methods derive from the batch when their config is created (TRL 1.16).

    GRPO, RLOO and similar configs hold completions per generation and micro-batches that use them. If TRL derived
    these values, they follow the new batch; if the script set them, as many completions are generated as before. GOLD
    and IW-OPD hold prompts per optimizer step and rank.
    """
    if getattr(arguments, "generation_batch_size", None) is None:
        return
    micro, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    generations = arguments.num_generations
    if not hasattr(arguments, "steps_per_generation"):
        completions = micro * accumulation
        arguments.generation_batch_size = completions // generations
    else:
        if arguments.steps_per_generation == old_accumulation:
            arguments.generation_batch_size = micro * arguments.world_size * accumulation
        completions = arguments.generation_batch_size
        if completions % (micro * arguments.world_size):
            raise ConfigError(
                f"generation_batch_size {completions} is not a multiple of {micro * arguments.world_size}, the "
                "micro-batches of all ranks.",
                place="ScalePlugin(micro_batch_size=)",
                fix="change one of them.",
            )
        arguments.steps_per_generation = completions // (micro * arguments.world_size)
    if completions % generations:
        raise ConfigError(
            f"{completions} completions are generated at once, which is not a multiple of num_generations "
            f"{generations}.",
            place="ScalePlugin(global_batch_size=)",
            fix=f"use a multiple of {generations}.",
        )


def _read_deepspeed_again(arguments: Any) -> None:
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments.hf_deepspeed_config = HfTrainerDeepSpeedConfig(arguments.deepspeed)
    arguments.hf_deepspeed_config.trainer_config_process(arguments)
    arguments.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=arguments.hf_deepspeed_config)
