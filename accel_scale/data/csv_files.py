"""CSV files → raw rows: Arrow's parser until a record does not parse, record by record from there."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from accel_scale.data.blocks import BLOCK_BYTES, RawBatch, open_bytes
from accel_scale.data.json_files import object_batches
from accel_scale.data.layout import Layout
from accel_scale.data.objects import UnusableRow


def _delimiter(path: str) -> str:
    return "\t" if ".tsv" in os.path.basename(path).lower() else ","


def csv_records(path: str) -> Iterator[tuple[int, list[str], UnusableRow | None]]:
    """(line, fields, fault) of each record, the header first; quoted fields may hold line ends."""
    csv.field_size_limit(sys.maxsize)
    with open_bytes(path) as raw:
        binary: Any = raw if isinstance(raw, io.BufferedIOBase) else io.BytesIO(raw.read())
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=_delimiter(path))
        num_columns = 0
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, [], UnusableRow("not valid CSV", str(error))
                continue
            if not fields:
                continue
            num_columns = num_columns or len(fields)
            fault = None
            if len(fields) != num_columns:
                fault = UnusableRow("wrong number of fields", f"{len(fields)}, the header has {num_columns}")
            elif any(_has_surrogates(text) for text in fields):
                fault = UnusableRow("not valid UTF-8")
            yield line, fields, fault


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def csv_batches(path: str, layout: Layout) -> Iterator[RawBatch]:
    num_rows = 0
    if layout.turn_keys is None:
        lines = _CsvLines(path)
        schema = layout.raw_schema()
        try:
            for table in _fast_csv(path, schema):
                yield RawBatch(table.select(schema.names), lines.finder(num_rows))
                num_rows += table.num_rows
            return
        except pa.ArrowInvalid:
            pass  # some record does not parse: go on from here record by record
    records = csv_records(path)
    names = next(records)[1]
    good_or_bad = (
        (line, None if fault else dict(zip(names, fields, strict=True)), fault) for line, fields, fault in records
    )
    yield from object_batches(islice(good_or_bad, num_rows, None), layout)


def _fast_csv(path: str, schema: pa.Schema) -> Iterator[pa.Table]:
    with open_bytes(path) as stream:
        reader = pyarrow.csv.open_csv(
            stream,
            pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES),
            pyarrow.csv.ParseOptions(delimiter=_delimiter(path), newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=schema, include_columns=schema.names),
        )
        for batch in reader:
            yield pa.Table.from_batches([batch])


class _CsvLines:
    """Record → line, found by reading the file again: only a file with bad rows pays for it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: np.ndarray | None = None

    def finder(self, num_before: int) -> Callable[[int], int]:
        def line_of(row: int) -> int:
            if self._lines is None:
                self._lines = np.array([line for line, _, _ in csv_records(self._path)][1:])
            return int(self._lines[num_before + row])

        return line_of
