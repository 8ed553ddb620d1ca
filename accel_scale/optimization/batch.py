"""Global batch arithmetic."""

from __future__ import annotations

from accel_scale.errors import ConfigError


def derive_accumulation(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Gradient accumulation steps: `global_batch_size` ÷ (`micro_batch_size` sequences × `world_size` ranks).

    `world_size` counts data-parallel ranks only.

    Raises:
        ConfigError: if that is not a whole number of at least one; names the nearest global batches that work.
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
    if rest:
        return None
    return max(size for size in range(1, min(micro_batch_size, per_rank) + 1) if per_rank % size == 0)
