"""Compare two tensors, and find the names in a model that share one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def difference(name: str, tensor: torch.Tensor, stored: torch.Tensor) -> tuple[str | None, float]:
    """Compare exactly, in the stored dtype; equal NaNs are equal."""
    if stored.shape != tensor.shape:
        return f"{name} has shape {list(stored.shape)} instead of {list(tensor.shape)}", 0.0
    if stored.numel() == 0:
        return f"{name} is empty", 0.0
    held = tensor.detach().to(device="cpu", dtype=stored.dtype)
    if not held.is_floating_point():
        return (None, 0.0) if held.equal(stored) else (f"{name} differs", float("inf"))
    # fp8 and similar dtypes have no arithmetic; float32 holds all their values exactly.
    gap = (held.float() - stored.float()).abs()
    gap = gap.masked_fill(held.isnan() & stored.isnan() | (held == stored), 0.0)
    largest = float("inf") if gap.isnan().any() else float(gap.max())
    return (f"{name} differs by up to {largest:.3g}" if largest else None), largest


def tied_names(expected: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Map each name of a shared tensor to all names of that tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: names for names in groups.values() if len(names) > 1 for name in names}
