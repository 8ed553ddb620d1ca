"""Blocks of JSON lines and text files: byte ranges, so that nothing is scanned or indexed before training."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_scale.data.pretraining.blocks import Block, BlockSource, block_size
from accel_scale.errors import ConfigError

BOM = b"\xef\xbb\xbf"
# A document must fit in memory many times over; anything longer is not a document but a file without line ends.
MAX_DOCUMENT_BYTES = 256 << 20
_READ_BYTES = 64 << 10
# A cut in continuous text is moved to the next line end or space within this distance (at most the smallest block).
_CUT_WINDOW_BYTES = 4 << 10
_PARAGRAPH_END = re.compile(rb"\n(?:[ \t\r\f\v]{0,256}\n)+")
_LOOK_BACK_BYTES = 260

Span = tuple[int, bytes]  # where in its file a document begins, and its bytes


class _Files(BlockSource):
    """Files one after the other, cut every `block_size` bytes; a block has the documents that begin between two."""

    def __init__(self, paths: Sequence[str], *, continuous: bool = False) -> None:
        self.paths = tuple(paths)
        sizes = [os.path.getsize(path) for path in self.paths]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.size_bytes, self.continuous = int(self._ends[-1]), continuous
        if not self.size_bytes:
            raise ConfigError("there is no text in it.", place=self.paths[0], fix="check how it was written.")
        self._block_bytes = block_size(self.size_bytes, continuous=continuous)
        self.num_blocks = -(-self.size_bytes // self._block_bytes)

    def _ranges(self, block: int) -> list[tuple[str, int, int, int]]:
        """(path, start, end, size) in bytes of the files, for each file that a block touches."""
        start = block * self._block_bytes
        end = min(start + self._block_bytes, self.size_bytes)
        found = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while index < len(self.paths) and (index == 0 or self._ends[index - 1] < end):
            before = int(self._ends[index - 1]) if index else 0
            size = int(self._ends[index]) - before
            if size:
                found.append((self.paths[index], max(0, start - before), min(size, end - before), size))
            index += 1
        return found

    def place(self, block: int, document: int) -> str:
        path, start = self._spans(block)[document][:2]
        return f"{path}, byte {start + 1}"

    def _spans(self, block: int) -> list[tuple[str, int, bytes]]:
        """(path, start, bytes) of each nonempty document of a block."""
        raise NotImplementedError

    def _decode(self, path: str, start: int, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"byte {start + error.start + 1} is not valid UTF-8.",
                place=line_place(path, start + error.start),
                fix="convert the file to UTF-8, e.g. with iconv.",
            ) from None


class JsonLines(_Files):
    """One JSON object with a text per line."""

    kind = "jsonl"

    def __init__(self, paths: Sequence[str], text_column: str) -> None:
        super().__init__(paths)
        self._column = text_column
        for path in self.paths:
            first = next((data for _, data in _lines(path, 0, 1 << 20, os.path.getsize(path))), None)
            if first is not None:
                self._text(path, 0, first)
                break

    def read(self, block: int) -> Block:
        return Block([text for path, start, data in self._lines(block) if (text := self._text(path, start, data))])

    def _lines(self, block: int) -> list[tuple[str, int, bytes]]:
        return [(path, *span) for path, *bounds in self._ranges(block) for span in _lines(path, *bounds)]

    def _spans(self, block: int) -> list[tuple[str, int, bytes]]:
        return [span for span in self._lines(block) if self._text(*span)]

    def place(self, block: int, document: int) -> str:
        path, start, _ = self._spans(block)[document]
        return line_place(path, start)

    def _text(self, path: str, start: int, data: bytes) -> str:
        """The text of a line; empty where it is null."""
        try:
            row = json.loads(data)
        except UnicodeDecodeError:
            self._decode(path, start, data)
            raise
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            raise ConfigError(
                f"the line is not valid JSON ({reason}).",
                place=line_place(path, start),
                fix="write one object per line, or remove the line.",
            ) from None
        if not isinstance(row, dict) or self._column not in row:
            columns = f"it has {', '.join(map(repr, row))}" if isinstance(row, dict) else "the line is no object"
            raise ConfigError(
                f"there is no column {self._column!r}; {columns}.",
                place=line_place(path, start),
                fix="name the column of the text with --text_column.",
            )
        return checked_text(row[self._column], self._column, lambda: line_place(path, start))


class TextLines(_Files):
    """Text files whose lines, or paragraphs between blank lines, are documents."""

    kind = "text"

    def __init__(self, paths: Sequence[str], *, paragraphs: bool) -> None:
        super().__init__(paths)
        self._split = _paragraphs if paragraphs else _lines

    def read(self, block: int) -> Block:
        return Block([self._decode(*span) for span in self._spans(block)])

    def _spans(self, block: int) -> list[tuple[str, int, bytes]]:
        return [(path, *span) for path, *bounds in self._ranges(block) for span in self._split(path, *bounds)]


class ContinuousText(_Files):
    """Text files that are one document each, read in fragments: cuts are moved to the next line end or space."""

    kind = "text"

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(paths, continuous=True)

    def read(self, block: int) -> Block:
        spans = self._fragments(block)
        texts = [self._decode(path, start, data) for path, start, data, _, _ in spans]
        return Block(texts, begins=not spans or spans[0][3], ends=not spans or spans[-1][4])

    def _spans(self, block: int) -> list[tuple[str, int, bytes]]:
        return [fragment[:3] for fragment in self._fragments(block)]

    def _fragments(self, block: int) -> list[tuple[str, int, bytes, bool, bool]]:
        """(path, start, bytes, begins its file, ends its file)."""
        found = []
        for path, start, end, size in self._ranges(block):
            with open(path, "rb") as file:
                first, last = _moved_cut(file, start, size), _moved_cut(file, end, size)
                file.seek(first)
                data = file.read(last - first)
            text = data.removeprefix(BOM) if first == 0 else data
            if text:
                found.append((path, first, text, first == 0, last == size))
        return found


def checked_text(value: Any, column: str, place: Any) -> str:
    """`value` if it is text, "" if it is null; raises a ConfigError with `place()` for anything else."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    raise ConfigError(
        f"column {column!r} holds {type(value).__name__} {str(value)[:40]!r}, not text.",
        place=place(),
        fix="name the column of the text with --text_column.",
    )


def line_place(path: str, offset: int) -> str:
    """``path:line`` of a byte of a file; reads the file up to there."""
    line, left = 1, offset
    with open(path, "rb") as file:
        while left and (data := file.read(min(16 << 20, left))):
            line += data.count(b"\n")
            left -= len(data)
    return f"{path}:{line}"


def _lines(path: str, start: int, end: int, size: int) -> list[Span]:
    """Nonblank lines that begin at bytes [start, end) of a file, without line ends."""
    first = max(0, start - 1)  # with the byte before: a line that begins at `start` follows a line end
    with open(path, "rb") as file:
        file.seek(first)
        data = file.read(end - first)
        if start:
            cut = data.find(b"\n") + 1
            if not cut:
                return []  # all within one long line
            first, data = first + cut, data[cut:]
        if data and not data.endswith(b"\n") and end < size:
            data += _until(file, path, len(data), re.compile(rb"\n"))
    found = []
    for line in data.split(b"\n"):
        text = line.removesuffix(b"\r")
        if first == 0:
            text = text.removeprefix(BOM)
        if text.strip():
            found.append((first, text))
        first += len(line) + 1
    return found


def _paragraphs(path: str, start: int, end: int, size: int) -> list[Span]:
    """Paragraphs (lines without a blank one between them) that begin at bytes [start, end) of a file."""
    first = max(0, start - _LOOK_BACK_BYTES)
    with open(path, "rb") as file:
        file.seek(first)
        data = file.read(end - first)
        begins = [position for position, _ in _paragraph_bounds(data, first) if first + position >= start]
        if not begins:
            return []  # all within one long paragraph
        if end < size and not _PARAGRAPH_END.search(data, begins[-1]):
            data += _until(file, path, len(data), _PARAGRAPH_END, before=data)
    found = []
    for position, stop in _paragraph_bounds(data, first):
        text = data[position:stop]
        if first + position == 0:
            text = text.removeprefix(BOM)
        if text.strip() and start <= first + position < end:
            found.append((first + position, text.strip(b"\r\n")))
    return found


def _paragraph_bounds(data: bytes, first: int) -> list[tuple[int, int]]:
    """(start, stop) of the paragraphs that begin within `data`: after blank lines and at the start of the file."""
    blanks = [match.span() for match in _PARAGRAPH_END.finditer(data)]
    starts = [*([0] if first == 0 else []), *(end for _, end in blanks)]
    stops = [*(begin for begin, _ in blanks[0 if first == 0 else 1 :]), len(data)]
    return [(start, stop) for start, stop in zip(starts, stops, strict=False) if start < len(data)]


def _until(file: Any, path: str, length: int, end: re.Pattern[bytes], *, before: bytes = b"") -> bytes:
    """The rest of an open file, up to the end of the next match of `end`, if any, which may begin in `before`."""
    found = b""
    while more := file.read(_READ_BYTES):
        tail = (before[-_LOOK_BACK_BYTES:] + found)[-_LOOK_BACK_BYTES:] if before else b""
        match = end.search(tail + more)
        if match and match.end() > len(tail):
            return found + more[: match.end() - len(tail)]
        found += more
        if length + len(found) > MAX_DOCUMENT_BYTES:
            raise ConfigError(
                f"a document is longer than {MAX_DOCUMENT_BYTES >> 20} MiB.",
                place=path,
                fix="cut it up, or train on it as one continuous text: a .txt file with --text_documents file.",
            )
    return found


def _moved_cut(file: Any, cut: int, size: int) -> int:
    """Move a cut in continuous text to the start of a line, else of a word, else of a character."""
    if cut in (0, size):
        return cut
    file.seek(cut)
    window = file.read(min(_CUT_WINDOW_BYTES, size - cut))
    if (line_end := window.find(b"\n")) >= 0:
        return cut + line_end + 1
    if (space := window.find(b" ")) >= 0:
        return cut + space  # most tokenizers want the space with the word after it
    continued = next((index for index, byte in enumerate(window) if byte & 0xC0 != 0x80), len(window))
    return cut + continued
