"""Flags of what DDP sends, for any recipe."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.flags.common import _flag

HOOKS = ("none", "bf16", "fp16", "powersgd")


@dataclass
class DdpHookArguments:
    """How gradients are compressed on their way between ranks."""

    ddp_comm_hook: str = _flag(
        "none",
        "DDP: gradients travel as they are, cast to bf16 or fp16, or as PowerSGD's low-rank factors.",
        choices=HOOKS,
    )
    powersgd_rank: int | None = _flag(None, "PowerSGD: rank of the factors. Default: 4.")
    powersgd_start_step: int | None = _flag(
        None, "PowerSGD: gradients travel whole before this optimizer step. Default: 100."
    )


@dataclass
class DdpArguments(DdpHookArguments):
    """As `DdpHookArguments`, with the bucket size that transformers' own arguments have."""

    ddp_bucket_cap_mb: int | None = _flag(
        None, "DDP: size of its gradient buckets; accel-scale comm --ddp_buckets measures which. Default: 25."
    )
