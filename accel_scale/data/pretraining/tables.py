"""Blocks of Arrow and Parquet files: ranges of rows, read from memory-mapped files or from small row groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from accel_scale.data.pretraining.blocks import Block, BlockSource, block_size
from accel_scale.data.pretraining.text_files import checked_text
from accel_scale.errors import ConfigError

# Row groups are decoded as a whole. One this many times the size of a block would be decoded that often.
LARGE_ROW_GROUP_BLOCKS = 4
_LEAST_LARGE_BYTES = 1 << 20


class TableSource(BlockSource):
    """Tables one after the other; a block is a range of rows, the same number in all blocks.

    Args:
        kind: ``arrow`` or ``parquet``.
        name: The source as the user named it.
        paths: Arrow files (IPC files or streams) or Parquet files with small row groups.
        text_column: The column of the text.
    """

    def __init__(self, kind: str, name: str, paths: Sequence[str], text_column: str) -> None:
        self.kind, self._name, self.paths, self._column = kind, name, tuple(paths), text_column
        self._open: Callable[[tuple[str, ...], str, tuple[int, ...]], Any] = (
            _arrow_rows if kind == "arrow" else _parquet_rows
        )
        self._times = _times(self.paths)
        rows = self._rows()
        self.size_bytes, self.num_rows = int(rows.text_bytes), int(rows.num_rows)
        if not self.num_rows:
            raise ConfigError(f"{name} has no rows.", place="--data", fix="name another source.")
        target = block_size(self.size_bytes)
        self._block_rows = max(1, target * self.num_rows // max(1, self.size_bytes))
        self.num_blocks = -(-self.num_rows // self._block_rows)

    def _rows(self) -> Any:
        # Handles of Parquet files must not be shared by processes that were forked; memory maps may be.
        return self._open(self.paths, self._column, (*self._times, os.getpid() if self.kind == "parquet" else 0))

    def read(self, block: int) -> Block:
        return Block([text for _, text in self._texts(block)])

    def place(self, block: int, document: int) -> str:
        return f"{self._name}, row {self._texts(block)[document][0] + 1}"

    def _texts(self, block: int) -> list[tuple[int, str]]:
        """(row, text) of the nonempty rows of a block."""
        start = block * self._block_rows
        values = self._rows().slice(start, min(start + self._block_rows, self.num_rows))
        found = []
        for row, value in enumerate(values, start):
            if text := checked_text(value, self._column, lambda row=row: f"{self._name}, row {row + 1}"):
                found.append((row, text))
        return found


def _times(paths: Sequence[str]) -> tuple[int, ...]:
    return tuple(os.stat(path).st_mtime_ns for path in paths)


@lru_cache(maxsize=64)
def _arrow_rows(paths: tuple[str, ...], column: str, version: tuple[int, ...]) -> _ArrowRows:
    return _ArrowRows(paths, column)


@lru_cache(maxsize=64)
def _parquet_rows(paths: tuple[str, ...], column: str, version: tuple[int, ...]) -> _ParquetRows:
    return _ParquetRows(paths, column)


class _ArrowRows:
    def __init__(self, paths: Sequence[str], column: str) -> None:
        import pyarrow as pa

        self._chunks: list[Any] = []
        for path in paths:
            source = pa.memory_map(path)
            try:
                reader = pa.ipc.open_file(source)
                batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
                schema = reader.schema
            except pa.ArrowInvalid:
                source.seek(0)
                stream = _opened_stream(path, source)
                batches, schema = list(stream), stream.schema
            check_text_column(schema, column, path)
            self._chunks += [batch.column(schema.get_field_index(column)) for batch in batches if batch.num_rows]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        self.num_rows = int(self._ends[-1]) if self._chunks else 0
        self.text_bytes = sum(_text_bytes(chunk) for chunk in self._chunks)

    def slice(self, start: int, end: int) -> list[Any]:
        values: list[Any] = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            chunk, before = self._chunks[index], int(self._ends[index - 1]) if index else 0
            piece = chunk.slice(start - before, min(end, int(self._ends[index])) - start)
            values += piece.to_pylist()
            start, index = start + len(piece), index + 1
        return values


def _opened_stream(path: str, source: object) -> Any:
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"the file cannot be read as Arrow ({str(error).split(chr(10))[0]}).", place=path, fix="write it again."
        ) from None


def _text_bytes(chunk: Any) -> int:
    """Bytes of text of a string array, from its first and last offset: nothing else of the file is touched."""
    import pyarrow as pa

    kind = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
    offsets = chunk.buffers()[1]
    if pa.types.is_dictionary(chunk.type) or pa.types.is_string_view(chunk.type) or offsets is None:
        return int(chunk.nbytes)
    positions = np.frombuffer(offsets, dtype=kind)
    return int(positions[chunk.offset + len(chunk)]) - int(positions[chunk.offset])


class _ParquetRows:
    def __init__(self, paths: Sequence[str], column: str) -> None:
        import pyarrow.parquet as pq

        self._column = column
        self._groups: list[tuple[str, int]] = []
        counts: list[int] = []
        self.text_bytes, self.largest_group_bytes = 0, 0
        for path in paths:
            metadata = parquet_metadata(path, column)
            for group in range(metadata.num_row_groups):
                described = metadata.row_group(group)
                size = column_bytes(described, column)
                self._groups.append((path, group))
                counts.append(described.num_rows)
                self.text_bytes += size
                self.largest_group_bytes = max(self.largest_group_bytes, size)
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.num_rows = int(self._ends[-1]) if counts else 0
        self._file = lru_cache(maxsize=32)(pq.ParquetFile)
        self._decoded = lru_cache(maxsize=2)(self._decode)

    def _decode(self, index: int) -> Any:
        path, group = self._groups[index]
        return self._file(path).read_row_group(group, columns=[self._column], use_threads=False).column(0)

    def slice(self, start: int, end: int) -> list[Any]:
        values: list[Any] = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            before = int(self._ends[index - 1]) if index else 0
            piece = self._decoded(index).slice(start - before, min(end, int(self._ends[index])) - start)
            values += piece.to_pylist()
            start, index = start + len(piece), index + 1
        return values


def has_large_row_groups(paths: Sequence[str], text_column: str) -> bool:
    """True if reading blocks from these Parquet files would decode everything several times."""
    rows = _parquet_rows(tuple(paths), text_column, (*_times(paths), os.getpid()))
    limit = max(_LEAST_LARGE_BYTES, LARGE_ROW_GROUP_BLOCKS * block_size(rows.text_bytes))
    return bool(rows.largest_group_bytes > limit)


def parquet_metadata(path: str, column: str) -> Any:
    """The footer of a Parquet file whose `column` is text; raises a ConfigError if it is not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            check_text_column(file.schema_arrow, column, path)
            return file.metadata
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"the file cannot be read as Parquet ({str(error).split(chr(10))[0]}).", place=path, fix="write it again."
        ) from None


def column_bytes(group: Any, column: str) -> int:
    """Uncompressed bytes of a top-level column in a row group's metadata."""
    columns = (group.column(index) for index in range(group.num_columns))
    return sum(part.total_uncompressed_size for part in columns if part.path_in_schema == column)


def check_text_column(schema: Any, column: str, place: str) -> None:
    """Raise a ConfigError unless `schema` has `column` and it holds text."""
    import pyarrow as pa

    if column not in schema.names:
        raise ConfigError(
            f"there is no column {column!r}; it has {', '.join(map(repr, schema.names))}.",
            place=place,
            fix="name the column of the text with --text_column.",
        )
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise ConfigError(
            f"column {column!r} holds {kind}, not text.",
            place=place,
            fix="name the column of the text with --text_column.",
        )
