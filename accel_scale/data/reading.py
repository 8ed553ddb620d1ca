"""Convert values of a source to rows in TRL's format, one by one; unusable ones are named by file and line.

`datasets`' own readers give up on a whole file at its first broken line, and do not say which line it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pyarrow as pa

from accel_scale.data.bad_rows import BadRow, BadRowPolicy, UnusableRow, place_of
from accel_scale.data.files import ROWS_PER_BATCH, Value, values_of
from accel_scale.data.layout import TURN_ROLES, Layout
from accel_scale.data.rows import RowConverter
from accel_scale.data.sources import file_kind
from accel_scale.data.spans import Span, lines_before
from accel_scale.errors import ConfigError

SAMPLE_ROWS = 1000
ROWS_WITH_IMAGES_PER_BATCH = 50  # they may hold the images' bytes
_LINE_KINDS = ("jsonl", "json", "csv", "text")


def usable_rows(
    values: Iterable[Value], layout: Layout, policy: BadRowPolicy, place: Callable[[int], str], folder: str = ""
) -> Iterator[dict[str, Any]]:
    """The good rows of `values`; bad ones go to `policy`, with `place(number)`. Relative paths start in `folder`."""
    convert = RowConverter(layout, folder)
    for number, value, fault in values:
        try:
            if fault is not None:
                raise fault
            row = convert(value, place(number))
        except UnusableRow as found:
            policy.handle(BadRow(place(number), found.reason, found.detail))
        else:
            if not policy.failed:
                yield row


def file_rows(span: Span, layout: Layout, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    """Rows of one file (or a part of one), bad ones handled by `policy`."""

    def place(number: int) -> str:
        return place_of(span.path, lines_before(span) + number, counts_lines=file_kind(span.path) in _LINE_KINDS)

    with _read_errors(span.path):
        values = values_of(span, dict(layout.columns).values())
        yield from usable_rows(values, layout, policy, place, os.path.dirname(span.path))
    policy.end_of_file()


def read_rows(span: Span, layout: Layout, policy: BadRowPolicy) -> Iterator[pa.Table]:
    """`file_rows` as tables."""
    return tables_of(file_rows(span, layout, policy), layout)


def tables_of(rows: Iterator[dict[str, Any]], layout: Layout) -> Iterator[pa.Table]:
    """Rows as tables of `layout.features()`; turns with more than role and content are stored as JSON."""
    schema = layout.features().arrow_schema
    turns = [name for name in TURN_ROLES if name in schema.names] if layout.rich else []
    plain = pa.schema([(f.name, pa.list_(pa.string()) if f.name in turns else f.type) for f in schema])
    while batch := list(islice(rows, ROWS_WITH_IMAGES_PER_BATCH if layout.images else ROWS_PER_BATCH)):
        for row in batch if turns else ():
            row.update({name: [json.dumps(turn, ensure_ascii=False) for turn in row[name]] for name in turns})
        yield pa.Table.from_pylist(batch, schema=plain).cast(schema)


def sample_rows(path: str) -> tuple[list[str], list[dict[str, Any]]]:
    """(column names, the first readable rows as plain objects), from which a layout is detected."""
    with _read_errors(path):
        found = (value for _, value, _ in values_of(Span(path)) if isinstance(value, dict))
        rows = list(islice(found, SAMPLE_ROWS))
    if not rows:
        raise ConfigError("the file has no row that can be read.", place=path, fix="check its contents.")
    return list(dict.fromkeys(name for row in rows for name in row)), rows


@contextmanager
def _read_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"the file cannot be read: {' '.join(str(error).split())}.",
            place=path,
            fix="check that it is complete and what its extension says it is.",
        ) from error
