"""Number formats of gradients: the initial fp16 loss scale, and the dtype of reductions."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.facts.precisions import REDUCE_DTYPES
from accel_scale.parallel.engine import strategy_of

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from accel_scale.flags.common import SharedArguments


def use_gradient_numbers(accelerator: Accelerator, flags: SharedArguments) -> None:
    """Apply ``--loss_scale`` and ``--reduce_dtype``; call it before `accelerator.prepare`.

    DDP sends gradients as its communication hook does, which `settings.resolve` has set.
    """
    if flags.loss_scale is not None:
        _start_scale(accelerator, flags.loss_scale)
    if flags.reduce_dtype is not None:
        _reduce_in(accelerator, flags.reduce_dtype)


def _start_scale(accelerator: Accelerator, start: float) -> None:
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        power = math.log2(start)
        if not power.is_integer():
            raise ConfigError(
                f"DeepSpeed's loss scale starts at a power of two, which {start:g} is not.",
                place="--loss_scale",
                fix=f"use {2 ** round(power):g}.",
            )
        section = plugin.deepspeed_config.setdefault("fp16", {"enabled": True})
        section["initial_scale_power"] = int(power)
        return
    scaler = accelerator.scaler
    if scaler is not None:
        accelerator.scaler = type(scaler)(accelerator.device.type, init_scale=start)


def _reduce_in(accelerator: Accelerator, name: str) -> None:
    import torch

    strategy = strategy_of(accelerator)
    if strategy.is_deepspeed:
        accelerator.state.deepspeed_plugin.deepspeed_config["communication_data_type"] = name
    elif strategy.is_fsdp2:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        dtype: torch.dtype = getattr(torch, REDUCE_DTYPES[name])
        plugin.mixed_precision_policy = dataclasses.replace(policy, reduce_dtype=dtype)


def loss_scale_of(accelerator: Accelerator) -> float | None:
    """The current loss scale, for the log; None if the loss is not scaled."""
    wrapper = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapper is not None:
        is_scaled = wrapper.engine.fp16_enabled()
        return float(wrapper.engine.optimizer.loss_scale) if is_scaled else None
    scaler = accelerator.scaler
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
