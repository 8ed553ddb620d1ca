"""Records the bytes that a step allocates and frees, by layer and direction."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_scale.cycles import cycles_kept
from accel_scale.measuring.storages import storages
from accel_scale.tracing.blanks import Blank
from accel_scale.tracing.remembered import computed

_ATEN = torch.ops.aten
_ADD, _ITEM, _NONZERO = _ATEN.add.Tensor, _ATEN._local_scalar_dense.default, _ATEN.nonzero.default
_GROUPED, _SPLIT = _ATEN._grouped_mm.default, _ATEN.split_with_sizes.default
# Operations in which a mask may stand for indices.
_INDEXING = {
    _ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default,
    _ATEN._unsafe_index_put.default,
}  # fmt: skip
# Ids of operations whose operands are changed before they are computed: operators take long to hash.
_CHANGED = frozenset(map(id, (_NONZERO, _GROUPED, _SPLIT, *_INDEXING)))


class TooManyAllocationsError(Exception):
    """A run allocates more often than it was allowed to."""


# For each segment: bytes, and the segment in which freed memory was allocated.
Segments = dict[str, list[tuple[int, str]]]


class Recorder(TorchDispatchMode):
    """Records bytes allocated (positive) and freed (negative), in order, by the running segment.

    Segments: ``embed``, ``forward N`` of each layer, ``finish``, ``head`` (left to the planner's own head), ``leave``
    (autocast ends), ``top``, ``backward N``, ``bottom``.

    Args:
        mode: The mode of the fake tensors.
        adds_in_place: Whether two gradients of one tensor are summed in place, as autograd does without a mode.
        is_padded: The answer when the model asks whether rows are padded.
        num_experts: Number of experts. A search for the tokens of one expert finds its equal share of them; a search
            for the experts with tokens finds all of them.

    Attributes:
        allocations_left: Allocations until the run is ended with a `TooManyAllocationsError`.
    """

    def __init__(self, mode: FakeTensorMode, *, adds_in_place: bool, is_padded: bool, num_experts: int = 1) -> None:
        super().__init__()
        self.allocations_left = sys.maxsize
        self.segments: Segments = defaultdict(list)
        self.is_backward = False
        self.recomputing = 0
        self._mode = mode
        self._segment = "embed"
        self._adds_in_place, self._is_full = adds_in_place, not is_padded
        self._num_experts = num_experts
        self._sizes: dict[int, tuple[int, str]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # The last sum of gradients: segment, index among its events, the storage it reuses, bytes.
        self._sum: tuple[str, int, int, int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without a guard against torch.compile around every operation, which takes longer than the recording."""
        return False

    def mark(self, segment: str) -> None:
        """Assign what follows to `segment`."""
        self._segment = segment
        self.segments[segment]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if func is _ITEM:
            return _answer(args[0], self._is_full)
        if id(func) in _CHANGED:
            func, args, kwargs = self._changed(func, args, kwargs)
        result = computed(func, args, kwargs or {}, self._mode)
        heir = self._summed(args, result) if func is _ADD else None
        # One tensor is the result of most operations.
        for storage in [result.untyped_storage()] if isinstance(result, Blank) else storages(result):
            if id(storage) not in self._sizes and not _has(args, storage) and not _has(kwargs, storage):
                self._count(storage, heir)
        return result

    def _changed(self, func, args, kwargs):  # type: ignore[no-untyped-def]
        """An operation whose result has the expected shape, instead of one that depends on values."""
        if func is _NONZERO:
            shape = [self._num_found(args[0].numel()), args[0].dim()]
            return _ATEN.new_empty.default, (args[0], shape), {"dtype": torch.long}
        if func is _GROUPED:
            # torch's shape function (2.13) refuses fp32, although its kernels support it.
            return _ATEN.new_empty.default, (args[0], _grouped_shape(*args[:3])), {}
        if func is _SPLIT:
            dim = args[2] if len(args) > 2 else 0
            return func, (args[0], _shares(args[1], args[0].shape[dim]), *args[2:]), kwargs
        return func, (args[0], self._places(args[1]), *args[2:]), kwargs

    def _places(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """`indices` with masks replaced by index tensors of the size that `_num_found` gives."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                found.append(index)
                continue
            found += [index.new_empty(self._num_found(index.numel()), dtype=torch.long)] * index.dim()
        return found

    def _num_found(self, size: int) -> int:
        """Number of true values in a mask of `size`: all experts for a mask over experts, else one expert's share."""
        if self._num_experts > 1 and size <= self._num_experts + 1:
            return self._num_experts
        return max(1, size // self._num_experts)

    def _summed(self, args: Sequence[object], result: object) -> int | None:
        """The storage whose memory a sum reuses, if it is one of gradients."""
        if not self._adds_in_place or not self.is_backward or self.recomputing or len(args) < 2:
            return None
        first, second = args[:2]
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return None
        if not isinstance(result, torch.Tensor):
            return None
        key = id(first.untyped_storage())
        return key if self._sizes.get(key, (0, ""))[0] == result.untyped_storage().nbytes() else None

    def _count(self, storage: torch.UntypedStorage, heir: int | None) -> None:
        size = storage.nbytes()
        self._check_sum()
        origin = self._segment
        if heir is None:
            if self.allocations_left <= 0:
                raise TooManyAllocationsError
            self.allocations_left -= 1
            self.segments[self._segment].append((size, origin))
        else:
            origin = self._sizes[heir][1]
            self._sizes[heir] = (0, origin)
            self._sum = (self._segment, len(self.segments[self._segment]), heir, size)
        key = id(storage)
        self._sizes[key] = (size, origin)
        self._watched[key] = weakref.ref(storage, lambda _: self._release(key))

    def _check_sum(self) -> None:
        """Correct the last sum if its first gradient is still in use, since it was then not added to in place."""
        if self._sum is None:
            return
        segment, place, heir, size = self._sum
        self._sum = None
        if heir in self._sizes:
            origin = self._sizes[heir][1]
            self._sizes[heir] = (size, origin)
            self.allocations_left -= 1
            self.segments[segment].insert(place, (size, origin))

    def _release(self, key: int) -> None:
        del self._watched[key]
        size, origin = self._sizes.pop(key, (0, ""))
        if size:
            self.segments[self._segment].append((-size, origin))


def _has(values: object, storage: torch.UntypedStorage) -> bool:
    """True if one of an operation's operands is in this memory."""
    if isinstance(values, torch.Tensor):
        return values.untyped_storage() is storage
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return False
    return any(_has(value, storage) for value in values)


def _answer(value: torch.Tensor, is_full: bool) -> bool | int | float:
    """The value of a fake tensor when the model asks for it: whether rows are full, how many, how long."""
    if value.dtype is torch.bool:
        return is_full
    return 1.0 if value.is_floating_point() else 1


def _shares(sizes: Sequence[int], total: int) -> Sequence[int]:
    """`sizes` if they add up to `total`, else equal shares: the sizes were read from a fake tensor."""
    if sum(sizes) == total:
        return sizes
    share, rest = divmod(total, len(sizes))
    return [share + (index < rest) for index in range(len(sizes))]


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None) -> list[int]:
    """Shape of a product in which each group of rows (or columns) has its own matrix."""
    if a.dim() == 2 and b.dim() == 2:
        assert offsets is not None
        return [offsets.shape[0], a.shape[0], b.shape[1]]
    if a.dim() == 3 and b.dim() == 3:
        return [a.shape[0], a.shape[1], b.shape[2]]
    return [a.shape[-2], b.shape[-1]]


@contextlib.contextmanager
def watched(recorder: Recorder, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Tell the recorder when each layer begins, forward and backward."""
    last = len(layers) - 1

    def begin(index: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if recorder.is_backward:
            recorder.recomputing += 1
            return
        recorder.mark(f"forward {index}")
        hidden = _hidden([args, kwargs.get("hidden_states")])
        if index == 0 and hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda grad: recorder.mark("bottom"))

    def end(index: int, output: object) -> None:
        if recorder.is_backward:
            recorder.recomputing -= 1
            return
        hidden = _hidden(output)
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda grad: recorder.mark(f"backward {index}"))
        if index == last:
            recorder.mark("finish")

    handles = []
    for index, layer in enumerate(layers):
        handles.append(
            layer.register_forward_pre_hook(
                lambda module, args, kwargs, index=index: begin(index, args, kwargs), with_kwargs=True
            )
        )
        handles.append(
            layer.register_forward_hook(lambda module, args, output, index=index: end(index, output), always_call=True)
        )
    try:
        with cycles_kept():  # their collection would free tensors at any time
            yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden(tree: object) -> torch.Tensor | None:
    """The first floating-point tensor, which is the hidden states."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None
