"""Rotary embeddings of queries and keys on the tape."""

from __future__ import annotations

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.tape.families import Family
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tables import Tables
from accel_scale.planning.tape.tensors import Tensor


def turned(
    ops: Ops, model: ModelFacts, family: Family, query: Tensor, key: Tensor, tables: Tables
) -> tuple[Tensor, Tensor]:
    """Queries and keys with the first `rotary_dims` of each head rotated, as `family.rotation` says."""
    if family.rotation == "whole":
        return _whole(ops, family, query, key, tables)
    if family.rotation == "halves":
        return rotate_halves(ops, query, tables), rotate_halves(ops, key, tables)
    if family.rotation == "interleaved":
        cos, sin = (ops.new(table.numel, table.itemsize) for table in (tables.cos, tables.sin))
        tables = Tables(cos, sin)
    (query, query_rest), (key, key_rest) = _cut(ops, model, query), _cut(ops, model, key)
    if family.rotation == "inline":
        joined = ops.join([rotate(ops, query, tables), query_rest])
        return joined, ops.join([rotate(ops, key, tables), key_rest])
    query = rotate(ops, query, tables)
    key = rotate(ops, key, tables)
    joined = ops.join([query, query_rest])
    if family.rotation == "interleaved":
        # The joined query takes its name.
        del query
    return joined, ops.join([key, key_rest])


def _whole(ops: Ops, family: Family, query: Tensor, key: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Rotate whole heads; results in fp32 are cast back once both are rotated."""
    query_bytes, key_bytes = query.itemsize, key.itemsize
    if family.rotation_type == "fp32":
        query = ops.cast(query, FP32)
        key = ops.cast(key, FP32)
    query_turned, key_turned = rotate(ops, query, tables), rotate(ops, key, tables)
    if family.rotation_type == "input":
        return query_turned, key_turned
    return ops.cast(query_turned, query_bytes), ops.cast(key_turned, key_bytes)


def _cut(ops: Ops, model: ModelFacts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The part that is rotated, and the rest, which may be empty."""
    numel = x.numel * model.rotary_dims / model.head_dim
    first = x if numel == x.numel else ops.part(x, numel)
    return first, ops.part(x, x.numel - numel)


def rotate(ops: Ops, x: Tensor, tables: Tables) -> Tensor:
    """``x * cos + rotate_half(x) * sin``."""
    turned_here = ops.mul(x, tables.cos)
    return ops.add(turned_here, ops.mul(rotate_half(ops, x), tables.sin))


def rotate_halves(ops: Ops, x: Tensor, tables: Tables) -> Tensor:
    """``cat(first * cos - second * sin, second * cos + first * sin)``."""
    first, second = ops.split(x, [x.numel / 2] * 2)
    one = ops.minus(ops.mul(first, tables.cos), ops.mul(second, tables.sin))
    other = ops.add(ops.mul(second, tables.cos), ops.mul(first, tables.sin))
    return ops.join([one, other])


def rotate_half(ops: Ops, x: Tensor) -> Tensor:
    """``cat(-x2, x1)`` of the two halves, which may also be even and odd positions."""
    first, second = ops.part(x, x.numel / 2), ops.part(x, x.numel / 2)
    return ops.join([ops.scale(second), first])
