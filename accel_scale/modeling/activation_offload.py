"""Checkpointed layers whose inputs are kept in host memory until the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class OffloadStats:
    """Counts tensors and bytes moved by `checkpoint_with_offload` since `reset`; tracks the copies that are alive."""

    def __init__(self) -> None:
        self.num_tensors, self.num_bytes = 0, 0
        self._copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def reset(self) -> None:
        self.num_tensors, self.num_bytes = 0, 0

    def add(self, host: torch.Tensor) -> None:
        storage = host.untyped_storage()
        self._copies[id(storage)] = storage
        self.num_tensors += 1
        self.num_bytes += host.numel() * host.element_size()

    def holds(self, storage: object) -> bool:
        return self._copies.get(id(storage)) is storage


offload_stats = OffloadStats()


def checkpoint_with_offload(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """`torch.utils.checkpoint.checkpoint` whose inputs are kept in (pinned) host memory until the backward pass.

    Only the checkpoint's own inputs pass through these hooks: inside, the checkpoint installs its own. On a CPU the
    inputs are copied to other host memory, which exercises the path without any gain.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
        return checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    import torch

    pinned = tensor.device.type == "cuda"
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    # Asynchronous on the compute stream: a later kernel there cannot overwrite `tensor` before it is copied.
    host.copy_(tensor, non_blocking=pinned)
    offload_stats.add(host)
    return tensor.device, host


def _from_host(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, host = packed
    return host.to(device, non_blocking=host.is_pinned()) if device.type != "cpu" else host
