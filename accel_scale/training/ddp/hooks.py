"""Bucket size and communication hook of a DDP launch, registered when Accelerate wraps the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from accel_scale.errors import ConfigError
from accel_scale.facts.names import POWERSGD_RANK, POWERSGD_STEP
from accel_scale.training.ddp.powersgd import CountedBytes, PowerSgd

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

# Accelerate keeps the model from before DDP wrapped it, loops have the wrapped one: both lead to the hook.
_HOOKS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
STATE_FILE = "ddp_hook_{rank}.pt"


class CastHook(CountedBytes):
    """Sends gradients in 16 bits. Register `run`; torch's hook of this name refuses bf16 on CPUs, where it works.

    Attributes:
        failed: True if an exception left a bucket unreduced.
        is_stateful: False: nothing is kept between steps.
    """

    is_stateful = False
    failed = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._hook = default_hooks.bf16_compress_hook if dtype == torch.bfloat16 else default_hooks.fp16_compress_hook

    def run(self, state, bucket):  # type: ignore[no-untyped-def]  # not annotated: DDP compares annotations
        """The hook itself, as called by DDP."""
        self.count(bucket, bucket.buffer().numel() * 2)
        try:
            return self._hook(_all_ranks(), bucket)
        except BaseException:
            self.failed = True
            raise


class WholeHook(CountedBytes):
    """Sends gradients unchanged and counts them: DDP's own all-reduce, as a hook. For measurements."""

    is_stateful = False
    failed = False

    def run(self, state, bucket):  # type: ignore[no-untyped-def]  # not annotated: DDP compares annotations
        """The hook itself, as called by DDP."""
        self.count(bucket, bucket.buffer().numel() * bucket.buffer().element_size())
        return default_hooks.allreduce_hook(_all_ranks(), bucket)


def _all_ranks() -> Any:
    return torch.distributed.group.WORLD


@dataclass(frozen=True)
class DdpSettings:
    """The values of the DDP flags.

    Attributes:
        bucket_cap_mb: None uses the launch's handler, or DDP's default.
        comm_hook: ``none``, ``bf16``, ``fp16`` or ``powersgd``; ``counted`` for measurements.
        powersgd_rank, powersgd_start_step: See `PowerSgd`.
    """

    bucket_cap_mb: int | None = None
    comm_hook: str = "none"
    powersgd_rank: int = POWERSGD_RANK
    powersgd_start_step: int = POWERSGD_STEP

    @classmethod
    def of(cls, args: Any) -> DdpSettings:
        """Create from a recipe's arguments; missing or unset ones have their defaults."""
        values = {name.name: getattr(args, name.name, None) for name in fields(cls) if "powersgd" in name.name}
        return cls(
            bucket_cap_mb=getattr(args, "ddp_bucket_cap_mb", None),
            comm_hook=getattr(args, "ddp_comm_hook", None) or "none",
            **{name: value for name, value in values.items() if value is not None},
        )

    def make_hook(self, ddp: Any) -> Any:
        """Create the hook for a wrapped model; None for DDP's own reduction."""
        if self.comm_hook == "none":
            return None
        if self.comm_hook == "powersgd":
            trained = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
            if scalar := next((name for name, parameter in trained.items() if parameter.dim() == 0), None):
                raise ConfigError(
                    f"torch's PowerSGD cannot send {scalar}, which is a single number.",
                    place="--ddp_comm_hook powersgd",
                    fix="use --ddp_comm_hook bf16.",
                )
            return PowerSgd(trained, rank=self.powersgd_rank, start_step=self.powersgd_start_step)
        if self.comm_hook == "counted":
            return WholeHook()
        return CastHook(torch.bfloat16 if self.comm_hook == "bf16" else torch.float16)


def use_ddp_settings(accelerator: Accelerator, settings: DdpSettings) -> None:
    """Apply the buckets and the hook to the model that DDP will wrap; call before `accelerator.prepare`.

    Does nothing if the accelerator does not use DDP; `launching.ddp_rules` has refused such settings before.
    """
    if settings == DdpSettings():
        return

    class Handler(DistributedDataParallelKwargs):
        """Accelerate calls this handler after wrapping a model in DDP."""

        def register_comm_hook(self, model: Any) -> None:
            register_hook(model, settings)

    given = accelerator.ddp_handler or DistributedDataParallelKwargs()
    accelerator.ddp_handler = Handler(
        **{f.name: getattr(given, f.name) for f in fields(DistributedDataParallelKwargs)}
    )
    if settings.bucket_cap_mb is not None:
        accelerator.ddp_handler.bucket_cap_mb = settings.bucket_cap_mb


def register_hook(ddp: Any, settings: DdpSettings) -> Any:
    """Give a wrapped model its hook, before its first step; returns the hook."""
    hook = settings.make_hook(ddp)
    _HOOKS.pop(ddp.module, None)  # from an earlier wrapping
    if hook is not None:
        ddp.register_comm_hook(None, hook.run)
        _HOOKS[ddp] = _HOOKS[ddp.module] = hook
    return hook


def hook_of(model: nn.Module) -> Any:
    """The hook of a prepared model; None if it has none of ours."""
    modules: Iterable[Any] = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((_HOOKS[module] for module in modules if module in _HOOKS), None)


def hook_figures(model: nn.Module) -> dict[str, Any] | None:
    """Bytes of compressed and of whole gradients, for a run's summary; None without a hook."""
    hook = hook_of(model)
    if hook is None:
        return None
    whole = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return {"sent_bytes_per_step": hook.step_bytes, "gradient_bytes": whole}


# ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────
