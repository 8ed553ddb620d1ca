"""The precision of a run: from flags, launch file and device to dtypes, autocast, loss scaling and fp8."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device
from accel_scale.facts.names import PRECISIONS
from accel_scale.facts.precisions import PRECISION_FACTS
from accel_scale.facts.strategies import strategy_named
from accel_scale.modeling.fp8 import convert_to_fp8
from accel_scale.modeling.gathering import is_partitioned

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

__all__ = ["Precision", "convert_to_fp8", "enable_fp16_on_cpu", "precision_named", "resolve_precision"]

_BF16_TRUE_NOTE = (
    "bf16_true rounds every update to 8 bits of mantissa: changes below 1/256 of a weight are lost. Of the "
    "optimizers only adamw_torch_8bit and adamw_torch_4bit can round stochastically "
    "(--optim_args bf16_stochastic_round=True)."
)


@dataclass(frozen=True)
class Precision:
    """Arithmetic of a run.

    Attributes:
        name: One of `PRECISIONS`.
        model_dtype: Dtype of trained weights, and hence of their gradients and optimizer states.
        autocast_dtype: Dtype of matrix products under autocast; `None` without autocast.
        grad_scaler: True if the loss is scaled dynamically, as fp16 gradients need.
        fp8: True if linear layers multiply in fp8; the rest is bf16 under autocast.
        fp8_emulate: True if fp8 products are computed in fp32 from operands rounded to fp8.
        notes: Sentences to show to the user once.
    """

    name: str
    model_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    grad_scaler: bool = False
    fp8: bool = False
    fp8_emulate: bool = False
    notes: tuple[str, ...] = ()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matrix products (those that are not fp8)."""
        return self.autocast_dtype or self.model_dtype

    @property
    def mixed_precision(self) -> str:
        """The value for Accelerate and TrainingArguments: ``no``, ``fp16`` or ``bf16``.

        fp8 runs as ``bf16`` around layers converted by `convert_to_fp8`: with ``fp8`` Accelerate would convert them
        itself, a choice that TRL's default ``bf16=True`` silently undoes.
        """
        return "bf16" if self.fp8 else PRECISION_FACTS[self.name].launch

    @property
    def trainer_flags(self) -> dict[str, bool]:
        """``fp16`` and ``bf16`` for transformers' `TrainingArguments` and TRL's configs."""
        return {"fp16": self.mixed_precision == "fp16", "bf16": self.mixed_precision == "bf16"}

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Dtype of weights that are not trained, as under LoRA: they need no fp32 copy, only the compute dtype."""
        return self.compute_dtype

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Dtype of adapter weights: fp32 under mixed precision, so that small updates are not lost."""
        return self.model_dtype

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """The context for forward and loss in a plain training loop."""
        import torch

        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def scaler(self, device_type: str) -> torch.amp.GradScaler:
        """Dynamic loss scaling for a plain training loop; a no-op if it is not needed."""
        import torch

        return torch.amp.GradScaler(device_type, enabled=self.grad_scaler)


def precision_named(name: str, *, fp8_emulate: bool = False) -> Precision:
    """The `Precision` called `name`, not checked against any device or launch."""
    import torch

    facts = PRECISION_FACTS[name]
    return Precision(
        name=name,
        model_dtype=getattr(torch, facts.weights),
        autocast_dtype=getattr(torch, facts.autocast) if facts.autocast is not None else None,
        grad_scaler=facts.scales_loss,
        fp8=facts.is_fp8,
        fp8_emulate=facts.is_fp8 and fp8_emulate,
        notes=(_BF16_TRUE_NOTE,) if name == "bf16_true" else (),
    )


def resolve_precision(
    requested: str | None,
    *,
    launch_mixed_precision: str | None = None,
    launch_place: str | None = None,
    fp16_flag: bool | None = None,
    bf16_flag: bool | None = None,
    dtype_flag: str | None = None,
    device: Device = CPU,
    fp8_emulate: bool = False,
    strategy: str = "single",
    trains_adapters: bool = False,
    place: Callable[[str], str] = "--{}".format,
) -> Precision:
    """The precision that recipe, launch file and device agree on.

    Args:
        requested: ``--precision``, or `None` to follow the other settings, then the launch file, then the device.
        launch_mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8`` if set by the launch, else `None`.
        launch_place: File and line that set it.
        fp16_flag, bf16_flag, dtype_flag: transformers' and TRL's own flags; `None` if not given.
        device: Device that the run computes on.
        strategy: A name of `facts.strategies`.
        trains_adapters: True if the base is frozen; `dtype_flag` then applies to the base only.
        place: Returns where a flag was set.

    Raises:
        ConfigError: if two of them contradict each other, or the device does not support the precision.
    """
    name, source = wanted_precision(requested, fp16_flag, bf16_flag, dtype_flag, trains_adapters, place)
    if name is None:
        name = _launch_default(launch_mixed_precision) or device.default_precision
    wanted = PRECISION_FACTS[name].launch
    if launch_mixed_precision is not None and launch_mixed_precision != wanted:
        raise ConfigError(
            f"mixed_precision is {launch_mixed_precision} here, but the recipe computes in {name} ({place(source)}).",
            place=launch_place or "accelerate launch --mixed_precision",
            fix=f"write mixed_precision: {_quoted(wanted)} here, or remove {source} at {place(source)}.",
        )
    if not trains_adapters:
        _check_dtype(name, dtype_flag, place("dtype"))
    where = place(source) if source else (launch_place or place("precision"))
    _check_device(name, where, device)
    _check_strategy(name, where, device.type, strategy)
    if fp8_emulate and name != "fp8":
        raise ConfigError(
            f"fp8_emulate does nothing in {name}.", place=place("fp8_emulate"), fix="add --precision fp8 or remove it."
        )
    if name == "fp8":
        _check_fp8(where, device, fp8_emulate)
    precision = precision_named(name, fp8_emulate=fp8_emulate)
    note = device.precision_note if not source and launch_mixed_precision is None else None
    return replace(precision, notes=(*precision.notes, note)) if note else precision


def _quoted(launch_name: str) -> str:
    return "'no'" if launch_name == "no" else launch_name  # a bare no is false in YAML


def wanted_precision(
    requested: str | None,
    fp16_flag: bool | None,
    bf16_flag: bool | None,
    dtype_flag: str | None,
    trains_adapters: bool,
    place: Callable[[str], str],
) -> tuple[str | None, str]:
    """The precision requested by the recipe's own flags, and the flag that requests it."""
    if requested is not None and requested not in PRECISIONS:
        raise ConfigError(
            f"{requested!r} is not a precision.", place=place("precision"), fix=f"use {', '.join(PRECISIONS)}."
        )
    if fp16_flag and bf16_flag:
        raise ConfigError("fp16 and bf16 are both on.", place=place("fp16"), fix="remove one of them.")
    for flag, value in (("fp16", fp16_flag), ("bf16", bf16_flag)):
        if requested is not None and value is not None and value != (requested == flag):
            raise ConfigError(
                f"--precision {requested} and {flag} {str(value).lower()} contradict each other.",
                place=place(flag),
                fix=f"remove {flag}; --precision says it all.",
            )
    if requested is not None:
        return requested, "precision"
    if fp16_flag or bf16_flag:
        return ("fp16", "fp16") if fp16_flag else ("bf16", "bf16")
    if dtype_flag == "bfloat16" and not trains_adapters:
        return "bf16_true", "dtype"
    return None, ""


def _launch_default(launch_mixed_precision: str | None) -> str | None:
    return "fp32" if launch_mixed_precision == "no" else launch_mixed_precision


def _check_dtype(name: str, dtype_flag: str | None, where: str) -> None:
    """Check ``--dtype``: trained weights have one dtype per precision, which it may repeat but not change."""
    if dtype_flag is None or dtype_flag == PRECISION_FACTS[name].weights:
        return
    if name == "bf16" and dtype_flag == "bfloat16":
        fix = "use --precision bf16_true for bf16 weights, or remove dtype."
    else:
        fix = "remove dtype; --precision decides it."
    raise ConfigError(
        f"dtype {dtype_flag} contradicts {name}, which trains {PRECISION_FACTS[name].weights} weights.",
        place=where,
        fix=fix,
    )


def _check_device(name: str, where: str, device: Device) -> None:
    if PRECISION_FACTS[name].needs_bf16 and not device.supports_bf16:
        other = device.default_precision
        launched = f" (accelerate launch --mixed_precision {PRECISION_FACTS[other].launch})"
        raise ConfigError(
            f"{device.name} does not compute in bf16, which {name} needs.",
            place=where,
            fix=f"use --precision {other}{launched if 'mixed_precision' in where or 'launch' in where else ''}.",
        )


def _check_strategy(name: str, where: str, device_type: str, strategy: str) -> None:
    launched = strategy_named(strategy)
    refusal = launched.refused_precisions.get(name)
    if refusal is not None:
        raise ConfigError(f"{refusal.reason}.", place=where, fix=refusal.fix)
    if launched.is_deepspeed and name == "fp16" and device_type == "cpu" and not _cpu_multiplies_fp16():
        raise ConfigError(
            "DeepSpeed refuses fp16 on this CPU, which has no fp16 instructions.",
            place=where,
            fix="rehearse with --precision bf16, or with a DDP or FSDP2 launch file.",
        )


def _cpu_multiplies_fp16() -> bool:
    """Check for fp16 as DeepSpeed's `CPU_Accelerator.is_fp16_supported` does (0.19.8)."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _check_fp8(where: str, device: Device, emulate: bool) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("fp8 needs torchao.", place=where, fix="pip install 'accel-scale[fp8]'.")
    if not device.supports_fp8 and not emulate:
        raise ConfigError(
            f"{device.name} has no fp8 matrix products (NVIDIA Ada, Hopper and newer and AMD MI300 have).",
            place=where,
            fix="use --precision bf16, or add --fp8_emulate to try fp8 without its speed.",
        )


def enable_fp16_on_cpu(accelerator: Accelerator) -> bool:
    """Make Accelerate's fp16 effective on a CPU; call between creating the `Accelerator` and its `prepare`.

    Otherwise Accelerate ignores ``mixed_precision="fp16"`` on a CPU and computes in fp32 (checked on 1.15.0:
    `Accelerator.__init__` skips autocast and loss scaling where ``device.type == "cpu"``; tests/unit/test_precision.py
    fails if that changes). DeepSpeed has its own loss scaling and is left alone.

    Returns:
        True if anything had to be enabled.
    """
    import torch
    from accelerate.utils import DistributedType

    if (
        accelerator.mixed_precision != "fp16"
        or accelerator.device.type != "cpu"
        or accelerator.distributed_type == DistributedType.DEEPSPEED
        or accelerator.scaler is not None
    ):
        return False
    handler = accelerator.scaler_handler
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", **(handler.to_kwargs() if handler is not None else {}))
    return True


def cast_parameters(model: nn.Module, precision: Precision) -> None:
    """Cast trained weights to their training dtype and frozen ones to the compute dtype; quantised ones are kept."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or is_partitioned(parameter) or hasattr(parameter, "quant_state"):
            continue
        dtype = precision.model_dtype if parameter.requires_grad else precision.frozen_dtype
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
