"""Counts the bytes of tensors' storages while operations create and free them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


class StorageTracker(TorchDispatchMode):
    """Counts the current and peak bytes of storages that operations create while it is active.

    It sees everything that goes through torch's dispatcher, on any device, but no scratch memory in kernels. Storages
    that existed before only count once they are passed to `adopt`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        known = {id(storage) for storage in storages((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if id(storage) not in known:
                self._count(storage)
        return result

    def adopt(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count the storages of `tensors` that are not counted yet; returns the bytes added."""
        before = self.live_bytes
        for storage in storages(list(tensors)):
            self._count(storage)
        return self.live_bytes - before

    def reset_peak(self) -> None:
        """Reset the peak to the live bytes."""
        self.peak_bytes = self.live_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key, num_bytes).atexit = False

    def _release(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= num_bytes


def storages(tree: object) -> Iterator[torch.UntypedStorage]:
    """Storages of the tensors in `tree`; for quantised or sharded tensors, those of their inner tensors."""
    # Operations use tensors, lists and dictionaries; pytree's general walk would take as long as a small operation.
    if isinstance(tree, torch.Tensor):
        if is_traceable_wrapper_subclass(tree):
            names, _ = tree.__tensor_flatten__()
            yield from storages([getattr(tree, name) for name in names])
        else:
            yield tree.untyped_storage()
    elif isinstance(tree, (list, tuple, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from storages(part)
