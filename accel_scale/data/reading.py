"""Local files → Arrow tables of raw rows, fast where a block is clean and row by row where it is not.

`datasets`' own readers give up on a whole file at its first broken line. Here a block of a file (16 MiB) goes
through Arrow's multi-threaded parser; only a block which that refuses is read row by row, and only its bad rows
are lost, each with its line number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from accel_scale.data.bad_rows import BadRow, BadRowPolicy, place_of
from accel_scale.data.blocks import ROWS_PER_BATCH, LineCounter, RawBatch, Span, line_blocks
from accel_scale.data.csv_files import csv_batches, csv_records
from accel_scale.data.json_files import is_json_lines, json_line_batches, json_objects, object_batches
from accel_scale.data.layout import Layout
from accel_scale.data.normalise import normalise
from accel_scale.data.objects import raw_table
from accel_scale.data.sources import file_kind
from accel_scale.errors import ConfigError

SAMPLE_ROWS = 1000
_LINE_KINDS = ("jsonl", "json", "csv", "text")


def read_rows(span: Span, layout: Layout, policy: BadRowPolicy) -> Iterator[pa.Table]:
    """Normalised tables of one file (or a part of one), bad rows handled by `policy`."""
    counts_lines = file_kind(span.path) in _LINE_KINDS
    try:
        for batch in _raw_batches(span, layout):
            good = normalise(batch.table, layout)
            bad = batch.bad + [(batch.number_of(row), reason, "") for row, reason in good.bad]
            if bad:
                named = [
                    BadRow(place_of(span.path, number, counts_lines=counts_lines), reason, detail)
                    for number, reason, detail in sorted(bad)
                ]
                policy.handle(named)
            if good.table.num_rows and not policy.failed:
                yield good.table
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"the file cannot be read: {' '.join(str(error).split())}.",
            place=span.path,
            fix="check that it is complete and what its extension says it is.",
        ) from error
    policy.end_of_file()


def sample_rows(path: str) -> tuple[list[str], list[dict[str, Any]]]:
    """(column names, the first readable rows as plain objects): what a layout is found from."""
    kind = file_kind(path)
    names: list[str] | None = None
    rows: list[dict[str, Any]]
    try:
        if kind in ("parquet", "arrow"):
            table = next(_typed_tables(path, None), None)
            names = table.column_names if table is not None else []
            rows = table.slice(0, SAMPLE_ROWS).to_pylist() if table is not None else []
        elif kind == "csv":
            records = csv_records(path)
            names = next(records, (1, [], None))[1]
            rows = [dict(zip(names, r[1], strict=True)) for r in islice(records, SAMPLE_ROWS) if r[2] is None]
        elif kind == "text":
            names, rows = ["text"], [{"text": "text"}]
        else:
            found = (value for _, value, fault in json_objects(path) if fault is None)
            rows = list(islice((value for value in found if isinstance(value, dict)), SAMPLE_ROWS))
    except (OSError, pa.ArrowInvalid) as error:
        problem = f"the file cannot be read: {' '.join(str(error).split())}."
        raise ConfigError(problem, place=path, fix="check that it is complete and what its extension says.") from error
    if not rows:
        raise ConfigError("the file has no row that can be read.", place=path, fix="check its contents.")
    return names or list(dict.fromkeys(name for row in rows for name in row)), rows


def _raw_batches(span: Span, layout: Layout) -> Iterator[RawBatch]:
    kind = file_kind(span.path)
    if kind == "text":
        yield from _text_batches(span, layout)
    elif kind == "csv":
        yield from csv_batches(span.path, layout)
    elif kind in ("parquet", "arrow"):
        yield from _typed_batches(span.path, layout)
    elif kind == "json" and not is_json_lines(span.path):
        yield from object_batches(json_objects(span.path), layout)
    else:
        yield from json_line_batches(span, layout)


def _text_batches(span: Span, layout: Layout) -> Iterator[RawBatch]:
    """One row a line, as `datasets` reads text files; blank lines are no rows."""
    schema = layout.raw_schema()
    counter = LineCounter(span)
    for block in line_blocks(span):
        seen = counter.num_lines
        counter.num_lines += block.count(b"\n")
        bad: list[tuple[int, str, str]] = []
        try:
            lines = [line.rstrip("\r") for line in block.decode().split("\n") if line.strip()]
        except UnicodeDecodeError:
            lines, bad = _decodable_lines(block, counter.first_line(seen))
        # A line that is left has content, so none is found bad later and none needs its number.
        yield RawBatch(pa.Table.from_arrays([pa.array(lines, pa.string())], schema=schema), lambda row: row, bad)


def _decodable_lines(block: bytes, first_line: int) -> tuple[list[str], list[tuple[int, str, str]]]:
    lines, bad = [], []
    for number, line in enumerate(block.split(b"\n"), first_line):
        try:
            text = line.decode().rstrip("\r")
        except UnicodeDecodeError as error:
            bad.append((number, "not valid UTF-8", f"byte {error.start + 1} of the line"))
            continue
        if text.strip():
            lines.append(text)
    return lines, bad


def _typed_tables(path: str, columns: list[str] | None) -> Iterator[pa.Table]:
    if file_kind(path) == "parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_PER_BATCH, columns=columns):
                yield pa.Table.from_batches([batch])
        return
    with pa.memory_map(path) as mapped:
        try:
            reader = pyarrow.ipc.open_stream(mapped)
        except pa.ArrowInvalid:
            file = pyarrow.ipc.open_file(mapped)
            reader = (file.get_batch(index) for index in range(file.num_record_batches))
        for batch in reader:
            table = pa.Table.from_batches([batch])
            yield table.select([name for name in columns if name in table.column_names]) if columns else table


def _typed_batches(path: str, layout: Layout) -> Iterator[RawBatch]:
    offset = 0
    for table in _typed_tables(path, layout.raw_schema().names):
        rows, numbers, bad = raw_table(table, layout)
        shifted = [(offset + number + 1, reason, detail) for number, reason, detail in bad]
        numbers = [offset + number + 1 for number in numbers]
        yield RawBatch(rows, numbers.__getitem__, shifted)
        offset += table.num_rows
