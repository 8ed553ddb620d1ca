"""Apply accel-scale's settings to a model, optimizer and schedule created by the user's script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import SEGMENTS
from accel_scale.facts.strategies import Strategy
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.checkpoint_names import remember_used_conversions
from accel_scale.modeling.fsdp2_preparation import mend_fsdp2_preparation
from accel_scale.modeling.precision import cast_parameters
from accel_scale.parallel.engine import strategy_of
from accel_scale.plugin.replacing import (
    forget_schedules,
    replace_optimizer,
    scale_rates,
    set_peak,
    set_weight_decay,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from accelerate import Accelerator
    from torch import nn

    from accel_scale.modeling.precision import Precision
    from accel_scale.plugin.settings import ScaleSettings


def prepare_model(
    model: nn.Module,
    *,
    strategy: Strategy,
    device_type: str,
    precision: Precision | None = None,
    policy: CheckpointingPolicy | None = None,
    attention: str | None = None,
    adapter: Any = None,
) -> nn.Module:
    """Apply attention, adapter, dtypes, fp8 and activation checkpointing, in the order of their dependencies.

    Call before the model is sharded. Parameters keep their identity, so an existing optimizer still trains them.

    Args:
        strategy: The result of `strategy_of`.
        device_type: Where the model trains: ``cuda``, ``cpu`` …
        precision: None leaves the dtypes as they are.
        policy: None leaves activation checkpointing as it is.
        attention: Name of an attention implementation; None leaves it as it is.
        adapter: A PEFT configuration, which freezes the base; None trains the parameters that the script trains.

    Returns:
        The model, wrapped in a `PeftModel` if an adapter was asked for.

    Raises:
        ConfigError: if these settings cannot be applied to the model.
    """
    if strategy.is_fsdp2:
        mend_fsdp2_preparation()
    if strategy.partitions_weights:
        remember_used_conversions(model)
    if attention is not None:
        _set_attention(model, attention, device_type, precision)
    if adapter is not None:
        from peft import get_peft_model

        if hasattr(model, "peft_config"):
            raise ConfigError(
                "the model has an adapter already.",
                place="ScalePlugin(adapter=)",
                fix="remove it, or give the model without its adapter.",
            )

        model = get_peft_model(model, adapter)  # type: ignore[arg-type]
    if precision is not None:
        cast_parameters(model, precision)
        if precision.fp8:
            from accel_scale.modeling.precision import convert_to_fp8

            convert_to_fp8(model, emulate=precision.fp8_emulate)
    if policy is not None:
        if policy.kind == SEGMENTS and strategy.shards_weights:
            raise ConfigError(
                f"{strategy.label} gathers weights layer by layer, so that {policy} would gather them once more.",
                place="checkpointing_policy",
                fix="use full, or a launch file that leaves weights whole, e.g. accelerate_configs/zero2.yaml.",
            )
        use_reentrant = strategy.needs_reentrant(adapters=hasattr(model, "peft_config"))
        apply_checkpointing(model, policy, use_reentrant=use_reentrant)
    return model


def _set_attention(model: Any, name: str, device_type: str, precision: Precision | None) -> None:
    from accel_scale.launching.machine import detect_device
    from accel_scale.modeling.attention import resolve_attention

    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"{type(model).__name__} is not a transformers model, so its attention cannot be chosen.",
            place="attention",
            fix="remove it.",
        )
    dtype = precision.compute_dtype if precision is not None else model.dtype
    device, config = detect_device(device_type), model.config
    model.set_attn_implementation(
        resolve_attention(name, device=device, dtype=dtype, packing=False, model_config=config)
    )


def adapt_optimizer(
    scale: ScaleSettings,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    schedules: Sequence[Any] = (),
    *,
    models: Sequence[torch.nn.Module],
    global_batch_size: int,
    adapter_parameters: Sequence[torch.nn.Parameter] = (),
    keep_rates: bool = False,
) -> torch.optim.Optimizer:
    """Apply the plugin's settings to an optimizer created by the script; returns a new one if it is replaced.

    Args:
        schedules: The script's own over `optimizer`, which stay in use unless the plugin has one.
        models: The models that it may update.
        global_batch_size: In sequences, for scaling the learning rate.
        adapter_parameters: As for `replace_optimizer`.
        keep_rates: The learning rates are already the plugin's.
    """
    if scale.lr_schedule is not None:
        schedules = ()  # the plugin's takes their place
    if scale.optimizer is not None:
        from accel_scale.optimization.optimizers import keep_embeddings_wide

        for model in models:
            keep_embeddings_wide(scale.optimizer, model)
        optimizer = replace_optimizer(
            optimizer,
            scale.optimizer,
            schedules=schedules,
            adapter_parameters=adapter_parameters,
            optim_args=scale.optim_args,
            device_type=accelerator.device.type,
            strategy=strategy_of(accelerator).name,
            offload_optimizer=scale.launch.parallel.offloads_optimizer,
            say=accelerator.print,
        )
    if scale.lr_schedule is not None:
        forget_schedules(optimizer)
    if scale.learning_rate is not None and not keep_rates:
        set_peak(optimizer, schedules, scale.learning_rate)
    if scale.scale_lr_from_batch_size is not None and not keep_rates:
        factor = scale.learning_rate_factor(global_batch_size)
        scale_rates(optimizer, schedules, [factor] * len(optimizer.param_groups))
    if scale.weight_decay is not None:
        set_weight_decay(optimizer, scale.weight_decay)
    return optimizer


def step_once_per_update(scheduler: Any) -> None:
    """Make a prepared scheduler step once per optimizer step, the unit of its length.

    Accelerate steps it once per process, because ordinary scripts count micro-batches of one process; with
    `split_batches` it does not (`AcceleratedScheduler.step`, 1.15.0).
    """
    scheduler.split_batches = True
