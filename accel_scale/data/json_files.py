"""JSON lines and JSON lists → raw rows: Arrow's parser for clean blocks, line by line for the others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.json

from accel_scale.data.blocks import BOM, ROWS_PER_BATCH, LineCounter, RawBatch, Span, line_blocks, open_bytes
from accel_scale.data.layout import Layout
from accel_scale.data.objects import UnusableRow, raw_row
from accel_scale.data.sources import file_kind
from accel_scale.data.turns import RICH_KEYS
from accel_scale.errors import ConfigError

# A block that does not parse is tried again in parts of this size; only those that still do not are read by line.
_PART_BYTES = 256 << 10
_RICH_MARKS = [f'"{key}"'.encode() for key in RICH_KEYS if key != "name"]


def json_line_batches(span: Span, layout: Layout) -> Iterator[RawBatch]:
    """Raw rows of JSON lines."""
    schema = layout.raw_schema()
    counter = LineCounter(span)
    for block in line_blocks(span):
        for part, table in _parsed_parts(block, schema, layout):
            seen = counter.num_lines
            counter.num_lines += part.count(b"\n")
            if table is None:
                yield from object_batches(_decoded_lines(part, counter.first_line(seen)), layout)
            else:
                yield RawBatch(table, _line_finder(part, counter, seen))


def _parsed_parts(block: bytes, schema: pa.Schema, layout: Layout) -> Iterator[tuple[bytes, pa.Table | None]]:
    """A block parsed as a whole if it can be, else in small parts, so that one bad line costs only its part."""
    table = _parse_block(block, schema, layout)
    if table is not None or len(block) <= _PART_BYTES:
        yield block, table
        return
    start = 0
    while start < len(block):
        end = block.find(b"\n", start + _PART_BYTES) + 1 or len(block)
        part = block[start:end]
        yield part, _parse_block(part, schema, layout)
        start = end


def _line_finder(block: bytes, counter: LineCounter, seen: int) -> Callable[[int], int]:
    """Row of a parsed block → line of the file; blank lines are no rows."""
    lines: list[int] = []

    def line_of(row: int) -> int:
        if not lines:
            lines.extend(number for number, line in enumerate(block.split(b"\n")) if line.strip())
        return counter.first_line(seen) + lines[row]

    return line_of


def _parse_block(block: bytes, schema: pa.Schema, layout: Layout) -> pa.Table | None:
    """Arrow's parser on a block of JSON lines; None if any line needs a closer look."""
    # The parser would drop what turns carry beyond role and content.
    if layout.turn_keys and any(mark in block for mark in _RICH_MARKS):
        return None
    answer = layout.column("answer")
    parsed = schema
    if layout.whole_numbers and answer is not None:
        parsed = schema.set(schema.get_field_index(answer), pa.field(answer, pa.int64()))
    options = pyarrow.json.ParseOptions(explicit_schema=parsed, unexpected_field_behavior="ignore")
    longest = len(block) + 1
    for block_size in (min(1 << 20, longest), longest):  # the second for rows longer than the first
        try:
            read_options = pyarrow.json.ReadOptions(block_size=block_size)
            table = pyarrow.json.read_json(pa.BufferReader(block), read_options, options)
            block.decode()  # Arrow does not look at the encoding
        except UnicodeDecodeError:
            return None
        except pa.ArrowInvalid as error:
            if "straddling" in str(error):
                continue
            return None
        num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
        if table.num_rows != num_lines and table.num_rows != sum(bool(line.strip()) for line in block.split(b"\n")):
            return None  # two objects on a line, or one over several
        return table.cast(schema)
    return None


def _decoded_lines(block: bytes, first_line: int) -> Iterator[tuple[int, Any, UnusableRow | None]]:
    """(line, object, fault) of each line that is not blank."""
    for number, line in enumerate(block.split(b"\n"), first_line):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode()), None
        except UnicodeDecodeError as error:
            yield number, None, UnusableRow("not valid UTF-8", f"byte {error.start + 1} of the line")
        except json.JSONDecodeError as error:
            yield number, None, UnusableRow("not valid JSON", f"{error.msg}, column {error.colno}")
        except RecursionError:
            yield number, None, UnusableRow("not valid JSON", "nested too deeply")


def object_batches(objects: Iterator[tuple[int, Any, UnusableRow | None]], layout: Layout) -> Iterator[RawBatch]:
    schema = layout.raw_schema()
    while chunk := list(islice(objects, ROWS_PER_BATCH)):
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        bad: list[tuple[int, str, str]] = []
        for number, value, fault in chunk:
            try:
                if fault is not None:
                    raise fault
                rows.append(raw_row(value, layout))
                numbers.append(number)
            except UnusableRow as verdict:
                bad.append((number, verdict.reason, verdict.detail))
        yield RawBatch(pa.Table.from_pylist(rows, schema=schema), numbers.__getitem__, bad)


def is_json_lines(path: str) -> bool:
    with open_bytes(path) as stream:
        return not stream.read(1 << 16).removeprefix(BOM).lstrip().startswith(b"[")


def json_objects(path: str) -> Iterator[tuple[int, Any, UnusableRow | None]]:
    """(line, object, fault) of a file of JSON lines or of one JSON list."""
    if file_kind(path) == "jsonl" or is_json_lines(path):
        first_line = 1
        for block in line_blocks(Span(path)):
            if first_line == 1 and file_kind(path) == "json":
                _refuse_single_object(path, block)
            yield from _decoded_lines(block, first_line)
            first_line += block.count(b"\n")
        return
    with open_bytes(path) as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # A bad byte becomes half a surrogate pair, which the row's own check then finds and names.
        text = data.decode("utf-8-sig", errors="surrogateescape")
    yield from _list_elements(text)


def _refuse_single_object(path: str, block: bytes) -> None:
    try:
        json.loads(block.lstrip().split(b"\n", 1)[0])
        return
    except ValueError:
        pass
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


def _list_elements(text: str) -> Iterator[tuple[int, Any, UnusableRow | None]]:
    """Elements of a JSON list, going on after a broken one with the next object that has a column in common."""
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
            yield (
                line,
                None,
                UnusableRow("not valid JSON", detail if position < len(text) else "the list is not closed"),
            )
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
