"""Flags of gradient compression and buckets under DDP, for any recipe."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.facts.names import DDP_HOOKS, POWERSGD_RANK, POWERSGD_STEP
from accel_scale.flags.common import _flag


@dataclass
class DdpHookArguments:
    """How gradients are compressed on their way between ranks."""

    ddp_comm_hook: str = _flag(
        "none",
        "DDP: gradient compression. none, bf16 or fp16 (cast before sending), or powersgd (low-rank factors).",
        choices=DDP_HOOKS,
    )
    powersgd_rank: int | None = _flag(None, f"PowerSGD: rank of the factors. Default: {POWERSGD_RANK}.")
    powersgd_start_step: int | None = _flag(
        None, f"PowerSGD: optimizer step at which compression starts. Default: {POWERSGD_STEP}."
    )


@dataclass
class DdpArguments(DdpHookArguments):
    """`DdpHookArguments` plus the bucket size, which transformers' own arguments have."""

    ddp_bucket_cap_mb: int | None = _flag(
        None, "DDP: size of gradient buckets; benchmarks/ddp_buckets.py measures the best. Default: 25."
    )
