"""Values of local files in order: an object for a good row, the error for one that does not parse."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from accel_scale.data.bad_rows import UnusableRow
from accel_scale.data.sources import file_kind
from accel_scale.data.spans import BOM, Span, lines_of, open_bytes
from accel_scale.errors import ConfigError

# Rows held in memory as Python objects at a time.
ROWS_PER_BATCH = 1000
# Line in the span, or row number for files without lines, from 1; the value; the reason if there is none.
Value = tuple[int, Any, UnusableRow | None]


def values_of(span: Span, columns: Iterable[str] | None = None) -> Iterator[Value]:
    """Everything in a file, or in part of one, that is or should be a row.

    Args:
        columns: Columns to read from columnar files; None: all.
    """
    path, kind = span.path, file_kind(span.path)
    if kind == "csv":
        return _csv_records(path)
    if kind in ("parquet", "arrow"):
        return _typed_rows(path, None if columns is None else list(columns))
    if kind == "text":
        return _text_lines(span)
    return _json_lines(span) if kind == "jsonl" or _is_json_lines(path) else _json_list(path)


def _text_lines(span: Span) -> Iterator[Value]:
    """One row per line, as `datasets` reads text files; blank lines are skipped."""
    for number, line in enumerate(lines_of(span), 1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, None, _bad_bytes(error)
            continue
        if text.strip():
            yield number, {"text": text}, None


def _bad_bytes(error: UnicodeDecodeError) -> UnusableRow:
    return UnusableRow("not valid UTF-8", f"byte {error.start + 1} of the line")


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_json_lines(path: str) -> bool:
    with open_bytes(path) as stream:
        return not stream.read(1 << 16).removeprefix(BOM).lstrip().startswith(b"[")


def _json_lines(span: Span) -> Iterator[Value]:
    is_first = file_kind(span.path) == "json"
    for number, line in enumerate(lines_of(span), 1):
        if not line.strip():
            continue
        value, fault = None, None
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            fault = _bad_bytes(error)
        except (ValueError, RecursionError) as error:
            if is_first:
                _refuse_single_object(span.path)
            fault = _not_json(error)
        is_first = False
        yield number, value, fault


def _not_json(error: Exception) -> UnusableRow:
    detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
    return UnusableRow("not valid JSON", detail)


def _refuse_single_object(path: str) -> None:
    try:
        with open_bytes(path) as stream:
            value = json.loads(stream.read())
    except ValueError:
        return
    if isinstance(value, dict):
        raise ConfigError(
            f"the file is one JSON object (with {', '.join(map(repr, list(value)[:5]))}), not rows.",
            place=path,
            fix="write a list of objects, or one object per line.",
        )


def _json_list(path: str) -> Iterator[Value]:
    """Elements of a JSON list; after a broken one, continues with the next object that shares a column."""
    with open_bytes(path) as stream:
        # A bad byte becomes half a surrogate pair, which the row check then finds and reports.
        text = stream.read().decode("utf-8-sig", errors="surrogateescape")
    decoder = json.JSONDecoder()
    between = re.compile(r"[\s,]*")
    columns: set[str] = set()
    position, line, counted = text.index("[") + 1, 1, 0
    while True:
        position = between.match(text, position).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, position), position
        if text.startswith("]", position):
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            detail = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            is_open = position >= len(text)
            yield line, None, UnusableRow("not valid JSON", "the list is not closed" if is_open else detail)
            found = _next_row(text, position + 1, columns, decoder)
            if found is None:
                return
            position = found
        else:
            columns.update(value if isinstance(value, dict) else ())
            yield line, value, None


def _next_row(text: str, position: int, columns: set[str], decoder: json.JSONDecoder) -> int | None:
    for brace in re.compile(r"\{").finditer(text, position):
        try:
            value, _ = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if not columns or columns & set(value):
            return brace.start()
    return None


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _csv_records(path: str) -> Iterator[Value]:
    """Records with the line that each begins on; quoted fields may contain line ends."""
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if ".tsv" in os.path.basename(path).lower() else ","
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter)
        names: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, None, UnusableRow("not valid CSV", str(error))
                continue
            if not fields:
                continue
            if names is None:
                names = fields
            elif len(fields) != len(names):
                detail = f"{len(fields)}, the header has {len(names)}"
                yield line, None, UnusableRow("wrong number of fields", detail)
            elif any(map(_has_surrogates, fields)):
                yield line, None, UnusableRow("not valid UTF-8")
            else:
                yield line, dict(zip(names, fields, strict=True)), None


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _typed_rows(path: str, columns: list[str] | None) -> Iterator[Value]:
    number = 0
    for batch in _record_batches(path, columns):
        names = batch.schema.names if columns is None else [name for name in batch.schema.names if name in columns]
        for start in range(0, batch.num_rows, ROWS_PER_BATCH):
            for value in batch.select(names).slice(start, ROWS_PER_BATCH).to_pylist():
                number += 1
                yield number, value, None


def _record_batches(path: str, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    if file_kind(path) == "parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(ROWS_PER_BATCH, columns=columns)
        return
    with pa.memory_map(path) as mapped:
        try:
            yield from pyarrow.ipc.open_stream(mapped)
        except pa.ArrowInvalid:
            file = pyarrow.ipc.open_file(mapped)
            for index in range(file.num_record_batches):
                yield file.get_batch(index)
