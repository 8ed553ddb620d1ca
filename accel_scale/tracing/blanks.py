"""Tensors without values that are the CPU's in every respect, so that torch never asks Python for their device.

A fake tensor of torch's own is a tensor on the meta device that claims another. Torch asks it for its device twice for
every operation, which takes a quarter of a run. A blank one is a fake tensor whose device is stored where that of a
real tensor is. Only the fake mode itself cannot compute with it: `by_mode` lends it tensors of its own kind.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")


class Blank(FakeTensor):
    """Made by `blank` and `view`. What each fake tensor has for itself is here an attribute of a mode's class."""

    constant: torch.Tensor | None = None


@functools.lru_cache(maxsize=1)
def _kind(mode: FakeTensorMode) -> type[Blank]:
    with torch._C._DisableTorchDispatch():
        shared = vars(FakeTensor(mode, torch.empty(0, device="meta"), CPU))
    return type("Blank", (Blank,), dict(shared))


def blank(mode: FakeTensorMode, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> Blank:
    """A tensor with new memory."""
    made = torch.Tensor._make_wrapper_subclass(_kind(mode), size, stride, None, None, dtype, torch.strided, CPU)
    return cast(Blank, made)


def view(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Blank:
    """A tensor in memory that there is."""
    made = torch.Tensor._make_wrapper_subclass(_kind(mode), (0,), None, None, None, dtype, torch.strided, CPU)
    with torch._C._DisableTorchDispatch():
        made.set_(storage, offset, size, stride)  # type: ignore[call-overload]
    return cast(Blank, made)


def by_mode(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], mode: FakeTensorMode) -> object:
    """The result of an operation from the fake mode, for those whose result depends on more than shapes."""
    lent = _Lent(mode)
    result = func(*map(lent.out, args), **{name: lent.out(value) for name, value in kwargs.items()})
    lent.update()
    return lent.back(result)


class _Lent:
    """Fake tensors in place of blank ones, for one operation."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # By the id of what it stands for: a blank tensor and its fake one, a memory and its fake one.
        self._tensors: dict[int, tuple[Blank, FakeTensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def out(self, value: object) -> object:
        """`value` with fake tensors for the blank ones in it."""
        if isinstance(value, (list, tuple)):
            return [self.out(each) for each in value]
        if not isinstance(value, Blank):
            return value
        if id(value) not in self._tensors:
            self._tensors[id(value)] = value, self._fake(value)
        return self._tensors[id(value)][1]

    def _fake(self, value: Blank) -> FakeTensor:
        storage = value.untyped_storage()
        with torch._C._DisableTorchDispatch():
            if id(storage) not in self._storages:
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
                self._storages[id(storage)] = storage, memory.untyped_storage()
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            _place(meta, self._storages[id(storage)][1], value)
            _share_bits(meta, value)
            fake = FakeTensor(self._mode, meta, CPU)
        fake.constant = value.constant
        return fake

    def update(self) -> None:
        """Give tensors the shapes and values that the operation gave to the fake ones."""
        for value, fake in self._tensors.values():
            if value.constant is not fake.constant:
                value.constant = fake.constant
            if _place_of(fake) != _place_of(value):
                with torch._C._DisableTorchDispatch():
                    _place(value, value.untyped_storage(), fake)

    def back(self, result: object) -> object:
        """`result` with blank tensors for the fake ones in it."""
        if isinstance(result, (list, tuple)):
            return type(result)(self.back(each) for each in result)
        if not isinstance(result, FakeTensor):
            return result
        for value, fake in self._tensors.values():
            if fake is result:
                return value
        storage = result.untyped_storage()
        own = next((own for own, given in self._storages.values() if given is storage), None)
        if own is None:
            own = blank(self._mode, (storage.nbytes(),), None, torch.uint8).untyped_storage()
        made = view(self._mode, own, *_place_of(result), result.dtype)
        if result.constant is not None:
            made.constant = result.constant
        with torch._C._DisableTorchDispatch():
            _share_bits(made, result)
        return made


def _place_of(value: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where a tensor begins in its memory, in values, its shape and its strides."""
    return int(value.storage_offset()), tuple(value.shape), tuple(value.stride())


def _place(value: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> None:
    value.set_(storage, *_place_of(like))  # type: ignore[call-overload]


def _share_bits(value: torch.Tensor, like: torch.Tensor) -> None:
    """Make a new tensor conjugated or negated as `like` is."""
    torch._C._set_conj(value, like.is_conj())
    torch._C._set_neg(value, like.is_neg())
