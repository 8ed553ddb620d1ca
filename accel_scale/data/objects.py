"""Rows as Python objects: the careful path, which says of each row that does not fit why it does not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accel_scale.data.layout import Layout
from accel_scale.data.turns import RICH_KEYS, as_turns

_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


class UnusableRow(Exception):
    """Why a row cannot be used: a reason for the tally, and a detail for the message."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class RichTurnsFound(Exception):
    """Turns with tool calls or reasoning, in rows after those that the layout was found from."""


def raw_row(value: Any, layout: Layout) -> dict[str, Any]:
    """One decoded row → the columns of `layout.raw_schema()`. Raises `UnusableRow` for wrong types."""
    if value is None:  # a line that says `null`: Arrow's parser takes it for a row without columns too
        value = {}
    if not isinstance(value, Mapping):
        raise UnusableRow("not an object with columns", f"it is {_kind(value)}")
    row: dict[str, Any] = {}
    for role, column in layout.columns:
        item = value.get(column)
        if role in layout.turn_roles:
            row[column] = _turn_list(item, column, layout)
        elif role in ("answer", "tools"):
            row[column] = _scalar_or_json(item, column)
        else:
            row[column] = _text(item, f"`{column}`")
    return row


def _kind(value: Any) -> str:
    return "empty" if value is None else _KINDS.get(type(value), type(value).__name__)


def _text(value: Any, name: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise UnusableRow(f"{name} is {_kind(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Half a surrogate pair: an emoji cut in two by whoever wrote the file.
        raise UnusableRow("not valid Unicode", f"{name}, character {error.start + 1}") from None
    return value


def _scalar_or_json(value: Any, column: str) -> str | None:
    if value is None or isinstance(value, str):
        return _text(value, f"`{column}`")
    return json.dumps(_without_none(value), ensure_ascii=False, default=str)


def _turn_list(value: Any, column: str, layout: Layout) -> list[dict[str, str | None]] | None:
    if value is None:
        return None
    turns = as_turns(value)
    if turns is None:
        raise UnusableRow(f"`{column}` is {_kind(value)}, not a list of turns")
    return [_turn(turn, column, layout) for turn in turns]


def _turn(turn: Any, column: str, layout: Layout) -> dict[str, str | None]:
    if isinstance(turn, str) and turn.startswith("{"):  # how Arrow stores `datasets.Json` columns
        with contextlib.suppress(ValueError):
            turn = json.loads(turn)
    if not isinstance(turn, Mapping):
        raise UnusableRow(f"a turn in `{column}` is {_kind(turn)}, not an object")
    assert layout.turn_keys is not None
    speaker_key, content_key = layout.turn_keys
    speaker = _text(turn.get(speaker_key), f"`{speaker_key}` of a turn in `{column}`")
    content = turn.get(content_key)
    if isinstance(content, list):
        content = "".join(_part(part, column) for part in content)
    kept: dict[str, str | None] = {speaker_key: speaker}
    kept[content_key] = _text(content, f"`{content_key}` of a turn in `{column}`")
    rich = {key: _without_none(turn[key]) for key in RICH_KEYS if turn.get(key)}
    if layout.rich:
        kept["extra"] = json.dumps(rich, ensure_ascii=False, default=str) if rich else None
    elif rich:
        raise RichTurnsFound
    return kept


def _part(part: Any, column: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        raise UnusableRow(f"a turn in `{column}` has content that is not text", str(kind))
    return text


def _without_none(value: Any) -> Any:
    """Arrow gives every object the keys of all others, as None: take them out again."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def raw_table(table: pa.Table, layout: Layout) -> tuple[pa.Table, list[int], list[tuple[int, str, str]]]:
    """A typed table (Parquet, Arrow, a hub data set) → `layout.raw_schema()`.

    Returns:
        (table, the input row of each row, the rows that do not fit as (input row, reason, detail)).
    """
    schema = layout.raw_schema()
    columns = [_cast(table, field, layout) for field in schema]
    if all(column is not None for column in columns):
        return pa.Table.from_arrays(columns, schema=schema), list(range(table.num_rows)), []
    names = [name for name in schema.names if name in table.column_names]
    rows, numbers, bad = [], [], []
    for number, value in enumerate(table.select(names).to_pylist()):
        try:
            rows.append(raw_row(value, layout))
            numbers.append(number)
        except UnusableRow as fault:
            bad.append((number, fault.reason, fault.detail))
    return pa.Table.from_pylist(rows, schema=schema), numbers, bad


def _cast(table: pa.Table, field: pa.Field, layout: Layout) -> pa.Array | None:
    """A column in its raw type, or None where that needs a look at every value."""
    if field.name not in table.column_names:
        return pa.nulls(table.num_rows, field.type)
    column = table.column(field.name)
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    value_type = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_string(field.type):
        plain = pa.types.is_string(value_type) or pa.types.is_large_string(value_type)
        if field.name == layout.column("answer"):
            plain = plain or pa.types.is_integer(value_type)
        return array.cast(pa.string()) if plain or pa.types.is_null(value_type) else None
    if not (pa.types.is_list(value_type) or pa.types.is_large_list(value_type)):
        return None
    turn = value_type.value_type
    if layout.rich or not pa.types.is_struct(turn) or layout.turn_keys is None:
        return None
    types = {turn.field(i).name: turn.field(i).type for i in range(turn.num_fields)}
    if not all(pa.types.is_string(types.get(key, pa.null())) for key in layout.turn_keys):
        return None
    flat = array.flatten()
    if any(key in types and pc.struct_field(flat, key).null_count < len(flat) for key in RICH_KEYS):
        return None
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = [pc.struct_field(flat, key) for key in layout.turn_keys]
    turns = pa.StructArray.from_arrays(values, names=list(layout.turn_keys))
    return pa.ListArray.from_arrays(pa.array(offsets), turns)
