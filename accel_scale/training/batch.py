"""Global batch arithmetic, and what a split batch does to batch normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def derive_accumulation(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Gradient accumulation steps: `global_batch_size` ÷ (`micro_batch_size` sequences × `world_size` ranks).

    `world_size` counts data-parallel ranks only.

    Raises:
        ConfigError: if that is not a whole number of at least one; names the nearest global batches that
        work.
    """
    for value, flag in (
        (global_batch_size, "--global_batch_size"),
        (micro_batch_size, "--per_device_train_batch_size"),
        (world_size, "the number of processes"),
    ):
        if value < 1:
            raise ConfigError(f"a batch cannot be made of {value} sequences.", place=flag, fix="use 1 or more.")
    per_step = micro_batch_size * world_size
    accumulation, rest = divmod(global_batch_size, per_step)
    if rest or not accumulation:
        below, above = accumulation * per_step, (accumulation + 1) * per_step
        nearest = f"{below} or {above}" if below else f"{above}"
        smaller = _largest_micro_batch(global_batch_size, micro_batch_size, world_size)
        hint = f", or --per_device_train_batch_size {smaller}" if smaller else ""
        raise ConfigError(
            f"a global batch of {global_batch_size} cannot be split into micro-batches of {micro_batch_size} "
            f"on {world_size} {'process' if world_size == 1 else 'processes'}.",
            place="--global_batch_size",
            fix=f"use --global_batch_size {nearest}{hint}.",
        )
    return accumulation


def _largest_micro_batch(global_batch_size: int, micro_batch_size: int, world_size: int) -> int | None:
    """The largest micro-batch up to `micro_batch_size` that divides the global batch over the ranks."""
    per_rank, rest = divmod(global_batch_size, world_size)
    if rest or not per_rank:
        return None
    return max(size for size in range(1, min(micro_batch_size, per_rank) + 1) if per_rank % size == 0)


def batch_norm_warning(model: nn.Module, *, micro_batch_size: int, world_size: int) -> str | None:
    """One sentence when `model` has batch normalisation over one rank's micro-batch only, else `None`.

    Batch statistics depend on the micro-batch, so neither accumulation nor data parallelism reproduces the
    global batch exactly with such layers.
    """
    from torch import nn

    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if not names:
        return None
    remedy = "convert them with sync_batch_norm(model)" if world_size > 1 else "use a larger micro-batch"
    return (
        f"{len(names)} batch normalisation layers (first: {names[0]}) compute their statistics over "
        f"{micro_batch_size} samples of one rank, not over the global batch; {remedy}."
    )


def sync_batch_norm(model: nn.Module, *, device_type: str, world_size: int) -> nn.Module:
    """`model` with its batch normalisation layers computing statistics over all ranks' micro-batches.

    Raises:
        ConfigError: on a CPU, where torch's `SyncBatchNorm` does not run.
    """
    from torch import nn

    if world_size == 1:
        return model
    if device_type == "cpu":
        raise ConfigError(
            "batch normalisation cannot be synchronised between CPU processes (torch has no such kernel).",
            fix="replace the layers by GroupNorm or LayerNorm, or train on accelerators.",
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)
