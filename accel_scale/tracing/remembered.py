"""Results of operations on fake tensors, computed once for operands of the same shapes.

torch's own cache of fake results spends most of a run on its keys, which cover much that cannot occur here. A result
that is not known comes from the meta device where it can: a fake mode takes ten times as long to get there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_scale.tracing.blanks import Blank, blank, by_mode, view

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
Key = tuple[object, ...]


class _Special(Exception):
    """An operand or a result is more than shapes, such as a tensor with values."""


@dataclass(frozen=True, slots=True)
class _Made:
    """How to make a tensor without the operation.

    Attributes:
        operand: Index of the tensor operand that is the result, or whose memory it views; None if its memory is new.
        is_operand: Whether the result is that operand.
        offset: Where a view begins, in values after its operand's first.
    """

    operand: int | None
    is_operand: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def again(self, operands: Sequence[Blank], mode: FakeTensorMode) -> Blank:
        if self.operand is not None and self.is_operand:
            return operands[self.operand]
        if self.operand is None:
            return blank(mode, self.size, self.stride, self.dtype)
        operand = operands[self.operand]
        offset = int(operand.storage_offset()) + self.offset
        return view(mode, operand.untyped_storage(), offset, self.size, self.stride, self.dtype)


_known: dict[Key, _Made | tuple[_Made, ...]] = {}
# Gradients whose shape depends on the first arguments alone: the others are the place of what was selected.
_NUM_READ: dict[object, int] = {torch.ops.aten.select_backward.default: 3, torch.ops.aten.slice_backward.default: 3}
_ALL = 99
_SELECT = torch.ops.aten.select.int
# By an operation's id: the number of arguments that its result's shape depends on; 0 if it depends on other things.
_num_read: dict[int, int] = {}
# Operations whose result is at a place in memory that is given, or is counted in values of another size.
_PLACED = (torch.ops.aten.as_strided, torch.ops.aten.as_strided_scatter, torch.ops.aten.set_,
           torch.ops.aten.view_as_real, torch.ops.aten.view_as_complex)  # fmt: skip
# Operations with other results on the CPU than elsewhere: statistics of a 16-bit norm have 16 bits there.
_OF_DEVICE = (torch.ops.aten.native_layer_norm.default,)
# Most results that are known at once: some models' worth, in about 50 MB.
_MOST = 100_000


def computed(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], mode: FakeTensorMode) -> object:
    """The result of `func`, from an earlier one with operands of the same shapes if there is one."""
    number = id(func)  # operators are never freed, and take long to hash
    num_read = _num_read.get(number)
    if num_read is None:
        num_read = _num_read[number] = _NUM_READ.get(func, _ALL) if _depends_on_shapes(func) else 0
    if not num_read:
        return by_mode(func, args, kwargs, mode)
    if func is _SELECT and not kwargs and isinstance(args[0], Blank):
        return _selected(mode, *args)  # type: ignore[arg-type]
    operands: list[Blank] = []
    try:
        key: Key = (number, _parts(args if num_read == _ALL else args[:num_read], operands))
        if kwargs:
            key += (*kwargs, _parts(list(kwargs.values()), []))
    except _Special:
        return by_mode(func, args, kwargs, mode)
    known = _known.get(key)
    if known is None:
        known = _on_meta(func, args, kwargs)
        if known is None:
            result = by_mode(func, args, kwargs, mode)
            try:
                known = _all_made(result, operands)
            except _Special:
                return result
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = known
    if isinstance(known, tuple):
        return tuple(each.again(operands, mode) for each in known)
    return known.again(operands, mode)


def _on_meta(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> _Made | tuple[_Made, ...] | None:
    """How to make the result, from the operation on the meta device; None if it does not run there."""
    if func in _OF_DEVICE:
        return None
    operands: list[torch.Tensor] = []

    def bare(value: object) -> object:
        if isinstance(value, Blank):
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            operands.append(made)
            return made
        return [bare(each) for each in value] if isinstance(value, (list, tuple)) else value

    try:
        with torch._C._DisableTorchDispatch():
            result = func(*map(bare, args), **{name: bare(value) for name, value in kwargs.items()})
            return _all_made(result, operands) if operands else None
    except (RuntimeError, _Special):
        return None


def _selected(mode: FakeTensorMode, operand: Blank, dim: int, index: int) -> object:
    """``operand.select(dim, index)``: loops over tokens take every index once."""
    size, stride = list(operand.shape), list(operand.stride())
    if operand.constant is not None or not -size[dim] <= index < size[dim]:
        return by_mode(_SELECT, (operand, dim, index), {}, mode)
    offset = (index + size[dim] if index < 0 else index) * stride[dim]
    del size[dim], stride[dim]
    return _Made(0, False, tuple(size), tuple(stride), offset, operand.dtype).again([operand], mode)


def _depends_on_shapes(func: OpOverload) -> bool:
    """True for torch's operations, except those that change an operand's shape or count a place in other units."""
    return (
        isinstance(func, OpOverload)
        and func.namespace in ("aten", "prims")
        and torch.Tag.inplace_view not in func.tags
        and func.overloadpacket not in _PLACED
        and func is not torch.ops.aten.view.dtype
    )


def _parts(values: Sequence[object], operands: list[Blank]) -> Key:
    """The part of a key that stands for `values`, whose tensors are added to `operands`.

    Raises:
        _Special: if one is more than shapes and plain values.
    """
    parts: list[object] = []
    for value in values:
        if isinstance(value, Blank):
            if value.constant is not None or value.is_conj() or value.is_neg():
                raise _Special
            operands.append(value)
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))  # 1, 1.0 and True are equal
        elif isinstance(value, (list, tuple)):
            parts.append(_parts(value, operands))
        else:
            raise _Special
    return tuple(parts)


def _is_plain(value: torch.Tensor) -> bool:
    """True for a tensor without values."""
    return isinstance(value, Blank) and value.constant is None


def _all_made(result: object, operands: Sequence[torch.Tensor]) -> _Made | tuple[_Made, ...]:
    if isinstance(result, (tuple, list)):
        return tuple(_how_made(each, operands) for each in result)
    return _how_made(result, operands)


def _how_made(result: object, operands: Sequence[torch.Tensor]) -> _Made:
    """How to make `result` from `operands`, which are all fake or all on the meta device.

    Raises:
        _Special: if more than its shape would be needed.
    """
    if not isinstance(result, torch.Tensor) or not (result.is_meta or _is_plain(result)):
        raise _Special
    if result.layout is not torch.strided or result.is_conj() or result.is_neg():
        raise _Special
    size, stride, offset = tuple(result.shape), result.stride(), int(result.storage_offset())
    storage = result.untyped_storage()
    for is_operand in (True, False):
        for index, operand in enumerate(operands):
            if operand is result if is_operand else operand.untyped_storage() is storage:
                return _Made(index, is_operand, size, stride, offset - int(operand.storage_offset()), result.dtype)
    with torch._C._DisableTorchDispatch():
        bare = torch.empty_strided(size, stride, dtype=result.dtype, device="meta")
    if offset or storage.nbytes() != bare.untyped_storage().nbytes():
        raise _Special
    return _Made(None, False, size, stride, 0, result.dtype)
