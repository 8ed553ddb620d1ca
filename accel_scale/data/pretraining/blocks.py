"""Sources of pretraining text as blocks that can be read in any order, and the size of a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from accel_scale.data.pretraining.encoding import Encoder

_TARGET_BLOCKS, _FEW_BLOCKS = 4096, 64
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 16 << 10, 256 << 10
# Smaller blocks for data of less than a megabyte, so that a share of them can be held out.
_TINY_BLOCK_BYTES, _TINY_CONTINUOUS_BYTES = 1 << 10, 4 << 10


def block_size(total_bytes: int, *, continuous: bool = False) -> int:
    """Bytes of text in a block, from the data's size alone, so that preparing data keeps its blocks.

    A 4096th of the data, but 16 KiB to 256 KiB: a lane holds one block in memory, a disk reads one at a time, and
    documents are shuffled only within a block. Data of fewer than 64 blocks of 16 KiB get smaller ones, of 1 KiB at
    least, or 4 KiB for continuous text, which is cut at the ends of its blocks.
    """
    size = min(max(total_bytes // _TARGET_BLOCKS, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)
    smallest = _TINY_CONTINUOUS_BYTES if continuous else _TINY_BLOCK_BYTES
    return max(smallest, min(size, total_bytes // _FEW_BLOCKS))


@dataclass
class Block:
    """Documents of one block, as texts, or as tokens if they were prepared; empty documents are left out.

    Args:
        texts: Texts, or None.
        tokens: Token arrays with opening and closing tokens, or None.
        begins, ends: Whether the first document begins and the last one ends in this block; a document that is
            larger than blocks is cut into fragments.
    """

    texts: list[str] | None = None
    tokens: list[np.ndarray] | None = None
    begins: bool = True
    ends: bool = True

    def __len__(self) -> int:
        return len(self.texts if self.texts is not None else self.tokens or ())

    def is_fragment(self, document: int) -> bool:
        """True if a document is not entirely in this block."""
        return (document == 0 and not self.begins) or (document == len(self) - 1 and not self.ends)

    def encode(self, documents: list[int], encoder: Encoder) -> list[np.ndarray]:
        """Tokens of documents, by their numbers in the block."""
        if self.tokens is not None:
            return [self.tokens[document] for document in documents]
        assert self.texts is not None
        last = len(self) - 1
        return encoder.encode(
            [self.texts[document] for document in documents],
            [self.begins or document != 0 for document in documents],
            [self.ends or document != last for document in documents],
        )


class BlockSource(ABC):
    """Random access to the blocks of one source. Instances hold no open files, so processes can share them.

    Attributes:
        kind: ``jsonl``, ``text``, ``arrow``, ``parquet`` or ``prepared``.
        size_bytes: Bytes of text, or of files where that is not known.
        num_blocks: Blocks, numbered from 0.
        continuous: Blocks are fragments of long texts rather than collections of documents.
    """

    kind: str
    size_bytes: int
    num_blocks: int
    continuous: bool = False

    @abstractmethod
    def read(self, block: int) -> Block:
        """The documents of a block, always the same ones in the same order."""

    @abstractmethod
    def place(self, block: int, document: int) -> str:
        """The human-readable location of a document: a file and a line, byte or row."""
