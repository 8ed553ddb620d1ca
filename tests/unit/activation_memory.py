"""Bytes of tensors that a function creates: at its peak, and kept for the backward pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from accel_scale.modeling.activation_offload import offload_stats

if TYPE_CHECKING:
    import torch


def saved_activation_bytes(function: Callable[[], Any]) -> int:
    """Bytes of distinct storages that `function` creates and that its result's autograd graph keeps alive.

    Counts what autograd saves, what selective checkpointing caches and what checkpoints hold as inputs; not
    parameters or other tensors that existed before, nor the tensors in the result, nor offloaded copies.

    Args:
        function: A forward pass returning a tensor with a graph, or a tuple or dict of such tensors.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    storages: dict[int, Any] = {}

    def tensors(tree: Any) -> Iterator[torch.Tensor]:
        return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))

    class RecordStorages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
            known = {id(tensor.untyped_storage()) for tensor in tensors((args, kwargs or {}))}
            result = func(*args, **(kwargs or {}))
            for tensor in tensors(result):
                storage = tensor.untyped_storage()
                if id(storage) not in known:
                    storages[id(storage)] = weakref.ref(storage)
            return result

    with RecordStorages():
        result = function()
    gc.collect()
    ours = {id(tensor.untyped_storage()) for tensor in tensors(result)}
    alive = [ref() for key, ref in storages.items() if key not in ours]
    return sum(s.nbytes() for s in alive if s is not None and not offload_stats.holds(s))


def peak_tensor_bytes(function: Callable[[], Any]) -> int:
    """The peak, during `function`, of the bytes of storages created since it began.

    Counts everything that goes through torch's dispatcher, on any device with memory, but not scratch memory inside
    kernels.
    """
    from accel_scale.verifying.measured_memory import StorageTracker

    class OfMemory(StorageTracker):
        def _count(self, storage: Any) -> None:
            if storage.device.type != "meta":
                super()._count(storage)

    with OfMemory() as tracker:
        function()
    return tracker.peak_bytes
