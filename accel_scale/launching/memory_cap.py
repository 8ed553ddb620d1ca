"""Limits on device memory, so that a large card can stand in for a small one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from accel_scale.errors import ConfigError
from accel_scale.units import format_bytes, parse_bytes

_PLACE = "--device_memory"


def memory_fraction(cap_bytes: int, total_bytes: int) -> float:
    """`cap_bytes` as a share of a device's `total_bytes`.

    Raises:
        ConfigError: if the cap is larger than the device.
    """
    if cap_bytes > total_bytes:
        raise ConfigError(
            f"this device has {format_bytes(total_bytes)}, less than the {format_bytes(cap_bytes)} wanted.",
            place=_PLACE,
            fix=f"use {format_bytes(total_bytes).replace(' ', '')} or less, or remove the flag.",
        )
    return cap_bytes / total_bytes


def cap_device_memory(text: str | int, *, device_type: str, device_index: int = 0) -> int:
    """Cap what torch's CUDA allocator may reserve on one device; beyond it, torch runs out of memory.

    The CUDA context, NCCL buffers and cuBLAS workspaces (together some hundred MiB) are outside the
    allocator, so the process takes slightly more than the cap. Call before the first tensor is made.

    Returns:
        The cap in bytes.

    Raises:
        ConfigError: without CUDA (host memory has no such cap), or if the device is smaller than the cap.
    """
    cap_bytes = parse_bytes(text, place=_PLACE)
    if device_type != "cuda":
        raise ConfigError(
            f"memory of a {device_type} device cannot be capped; torch offers it for CUDA only.",
            place=_PLACE,
            fix="remove the flag here; `accel-scale plan` predicts the peak for such a card.",
        )
    import torch

    total_bytes = torch.cuda.get_device_properties(device_index).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_fraction(cap_bytes, total_bytes), device_index)
    return cap_bytes


def fragmentation_advice(*, device_type: str, environment: Mapping[str, str] | None = None) -> str | None:
    """One sentence recommending expandable segments if they would help and are off, else `None`.

    Fixed segments fragment under varying sequence lengths; expandable ones return that memory (torch docs,
    "CUDA semantics", memory management). They must be enabled before the first CUDA allocation, hence in the
    environment.
    """
    settings = _allocator_settings(environment)
    if device_type != "cuda" or "expandable_segments" in settings or "backend:" in settings:
        return None
    return "set PYTORCH_ALLOC_CONF=expandable_segments:True: sequences of varying length fragment memory less."


def extends_segments(environment: Mapping[str, str] | None = None) -> bool:
    """True if the allocator keeps no blocks of fixed size: its segments grow, or the pool is CUDA's."""
    settings = _allocator_settings(environment)
    return "expandable_segments:True" in settings or "backend:cudaMallocAsync" in settings


def _allocator_settings(environment: Mapping[str, str] | None) -> str:
    environment = os.environ if environment is None else environment
    return environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
