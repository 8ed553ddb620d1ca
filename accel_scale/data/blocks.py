"""Local files as blocks of whole lines, and the numbers of their lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from accel_scale.data.sources import COMPRESSIONS, file_kind

BLOCK_BYTES = 16 << 20
ROWS_PER_BATCH = 10_000
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file, cut at line ends; `end` None means to the end of the file."""

    path: str
    start: int = 0
    end: int | None = None


@dataclass
class RawBatch:
    """Raw rows, the number (line or row, 1-based) of each, and the rows already found bad."""

    table: pa.Table
    number_of: Callable[[int], int]
    bad: list[tuple[int, str, str]] = field(default_factory=list)


def spans_of(path: str, *, span_bytes: int) -> list[Span]:
    """Cut a file into parts of about `span_bytes`, so that a stream of one big file can be shared out.

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


def open_bytes(path: str) -> Any:
    return pa.input_stream(path) if path.lower().endswith(COMPRESSIONS) else open(path, "rb")


def line_blocks(span: Span) -> Iterator[bytes]:
    """Blocks of whole lines."""
    with open_bytes(span.path) as stream:
        if span.start:
            stream.seek(span.start)
        left = None if span.end is None else span.end - span.start
        pieces: list[bytes] = []
        first = span.start == 0
        while data := stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
            left = None if left is None else left - len(data)
            if first:
                data, first = data.removeprefix(BOM), False
            cut = data.rfind(b"\n") + 1
            if cut:
                yield b"".join([*pieces, data[:cut]])
                pieces = []
            pieces.append(data[cut:])
        if rest := b"".join(pieces):
            yield rest


class LineCounter:
    """Line numbers within a span; what comes before it is counted only when somebody asks."""

    def __init__(self, span: Span) -> None:
        self._span, self._before, self.num_lines = span, None if span.start else 0, 0

    def first_line(self, num_lines: int) -> int:
        """The file's line number (1-based) of a block that starts after `num_lines` lines of the span."""
        if self._before is None:
            self._before = 0
            with open(self._span.path, "rb") as file:
                left = self._span.start
                while left and (data := file.read(min(BLOCK_BYTES, left))):
                    self._before += data.count(b"\n")
                    left -= len(data)
        return self._before + num_lines + 1
