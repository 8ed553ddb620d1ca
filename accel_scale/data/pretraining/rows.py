"""Human-readable row ids: which documents a row is made of, and the way back to the text."""

from __future__ import annotations

import re
from typing import NamedTuple

from accel_scale.errors import ConfigError

_PIECE = re.compile(r"(\d+)(?:@(\d+)-(\d+))?")


class Piece(NamedTuple):
    """Tokens [start, end) of a document of a block; `end` None: the whole document."""

    block: int
    document: int
    start: int = 0
    end: int | None = None


def row_id(label: str, pieces: list[Piece]) -> str:
    """``label:block:documents``, e.g. ``books.jsonl:17:35,8,91@0-77+18:4@0-20``.

    That row has documents 35 and 8 of block 17, the first 77 tokens of document 91, and 20 tokens of the fourth
    document of block 18; all are counted from 0.
    """
    blocks: list[str] = []
    previous = None
    for piece in pieces:
        text = str(piece.document) if piece.end is None else f"{piece.document}@{piece.start}-{piece.end}"
        if piece.block == previous:
            blocks[-1] += f",{text}"
        else:
            blocks.append(f"{piece.block}:{text}")
        previous = piece.block
    return f"{label}:{'+'.join(blocks)}"


def parse_row_id(text: str) -> tuple[str, list[Piece]]:
    """(label, pieces) of a row id; raises a ConfigError if it is not one."""
    label, _, rest = text.partition(":")
    pieces = []
    for group in rest.split("+"):
        block, _, documents = group.partition(":")
        for part in documents.split(","):
            match = _PIECE.fullmatch(part)
            if not match or not block.isdigit():
                raise ConfigError(
                    f"{text!r} is not a row id.", fix="copy one from the log, such as books.jsonl:17:35,8@0-77."
                )
            start, end = match.group(2), match.group(3)
            pieces.append(Piece(int(block), int(match.group(1)), int(start or 0), None if end is None else int(end)))
    return label, pieces
