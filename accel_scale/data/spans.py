"""Local files as bytes and lines, whole or in parts, compressed or not."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, cast

import pyarrow as pa

from accel_scale.data.sources import COMPRESSIONS, file_kind

BOM = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file, cut at line ends; `end` None means to the end of the file."""

    path: str
    start: int = 0
    end: int | None = None


def spans_of(path: str, *, span_bytes: int) -> list[Span]:
    """Cut a file into parts of about `span_bytes`, so that a stream of one big file can be divided.

    Only uncompressed JSON lines and text can be cut; other files are one span.
    """
    size = os.path.getsize(path)
    if file_kind(path) not in ("jsonl", "text") or path.lower().endswith(COMPRESSIONS) or size < 2 * span_bytes:
        return [Span(path)]
    cuts = [0]
    with open(path, "rb") as file:
        for target in range(span_bytes, size - span_bytes // 2, span_bytes):
            file.seek(target)
            file.readline()
            if cuts[-1] < file.tell() < size:
                cuts.append(file.tell())
    return [Span(path, start, end) for start, end in zip(cuts, [*cuts[1:], None], strict=True)]


def open_bytes(path: str) -> BinaryIO:
    """The file's content, decompressed."""
    if path.lower().endswith(COMPRESSIONS):
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, pa.input_stream(path)), _BUFFER_BYTES))
    return open(path, "rb", _BUFFER_BYTES)


def lines_of(span: Span) -> Iterator[bytes]:
    """The lines of a span with their line ends, without a byte order mark."""
    with open_bytes(span.path) as stream:
        if span.start:
            stream.seek(span.start)
        left = None if span.end is None else span.end - span.start
        for index, line in enumerate(stream):
            if left is not None:
                if left <= 0:
                    return
                left -= len(line)
            yield line.removeprefix(BOM) if index == span.start == 0 else line


@lru_cache(maxsize=64)
def lines_before(span: Span) -> int:
    """Number of lines before the span; counted only when one of its rows has to be named."""
    with open(span.path, "rb") as file:
        count, left = 0, span.start
        while left and (data := file.read(min(_BUFFER_BYTES, left))):
            count, left = count + data.count(b"\n"), left - len(data)
    return count
