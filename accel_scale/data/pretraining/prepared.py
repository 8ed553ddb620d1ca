"""Folders of tokens written by `accel-scale prepare`: their files, and blocks read from them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from accel_scale.data.pretraining.blocks import Block, BlockSource
from accel_scale.errors import ConfigError

MANIFEST, PLAN, FORMAT_VERSION = "manifest.json", "plan.json", 1
TOKENS, DOCUMENTS, BLOCKS, FRAGMENTS, FACTS = (
    "tokens.bin",  # uint16 or uint32: all tokens of the shard
    "documents.bin",  # int64: where each document begins in tokens.bin, and the end of the last one
    "blocks.bin",  # int64: the first document of each block, and the number of documents
    "fragments.bin",  # uint8 per block: 1 if its first document begins in it, + 2 if its last one ends in it
    "shard.json",  # numbers and checksums of the shard
)


def is_prepared(folder: str) -> bool:
    """True if `folder` was made by `accel-scale prepare`, finished or not."""
    return os.path.isfile(os.path.join(folder, MANIFEST)) or os.path.isfile(os.path.join(folder, PLAN))


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a prepared folder; raises a ConfigError if it is unfinished or of another version."""
    path = Path(folder, MANIFEST)
    if not path.is_file():
        raise ConfigError(
            f"{folder} was not prepared to the end.",
            place="--data",
            fix="run the same `accel-scale prepare` command again; it keeps what is finished.",
        )
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ConfigError(
            f"{folder} has format version {manifest.get('format_version')}, and this version reads {FORMAT_VERSION}.",
            place="--data",
            fix="prepare it again.",
        )
    return dict(manifest)


def shard_folder(folder: str, source: int, shard: int) -> str:
    """The folder of a shard."""
    return os.path.join(folder, f"source-{source:03d}", f"shard-{shard:05d}")


@dataclass(frozen=True)
class _Shard:
    tokens: np.ndarray
    documents: np.ndarray
    blocks: np.ndarray
    fragments: np.ndarray


@lru_cache(maxsize=64)  # each mapped file takes a file descriptor, of which a process may have a thousand
def _shard(folder: str, dtype: str) -> _Shard:
    """A memory-mapped shard: nothing is read until it is used, and all processes share the pages."""

    def mapped(name: str, kind: str) -> np.ndarray:
        path = os.path.join(folder, name)
        return np.memmap(path, dtype=kind, mode="r") if os.path.getsize(path) else np.empty(0, kind)

    return _Shard(mapped(TOKENS, dtype), mapped(DOCUMENTS, "<i8"), mapped(BLOCKS, "<i8"), mapped(FRAGMENTS, "u1"))


class PreparedSource(BlockSource):
    """One source of a prepared folder: the same blocks as the data it was made from, as tokens.

    Args:
        folder: A folder written by `accel-scale prepare`.
        index: Index among the folder's sources.
        manifest: The folder's manifest.
    """

    kind = "prepared"

    def __init__(self, folder: str, index: int, manifest: dict[str, Any]) -> None:
        told = manifest["sources"][index]
        self._folder, self._index, self._dtype = folder, index, str(manifest["dtype"])
        self.name, self.size_bytes = str(told["name"]), int(told["size_bytes"])
        self.num_tokens, self.continuous = int(told["num_tokens"]), bool(told["continuous"])
        self._ends = np.cumsum([shard["num_blocks"] for shard in told["shards"]], dtype=np.int64)
        self.num_blocks = int(self._ends[-1])
        for number, shard in enumerate(told["shards"]):
            for name, size in shard["file_bytes"].items():
                path = os.path.join(shard_folder(folder, index, number), name)
                found = os.path.getsize(path) if os.path.isfile(path) else None
                if found != size:
                    raise ConfigError(
                        f"the file {'is missing' if found is None else f'has {found} bytes instead of {size}'}.",
                        place=path,
                        fix="remove the shard's folder and run the same `accel-scale prepare` command again.",
                    )

    def _located(self, block: int) -> tuple[_Shard, int]:
        number = int(np.searchsorted(self._ends, block, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return _shard(shard_folder(self._folder, self._index, number), self._dtype), block - before

    def read(self, block: int) -> Block:
        shard, local = self._located(block)
        first, last = int(shard.blocks[local]), int(shard.blocks[local + 1])
        bounds = shard.documents[first : last + 1].tolist()
        flags = int(shard.fragments[local])
        tokens = [np.asarray(shard.tokens[start:end], dtype=np.int32) for start, end in pairwise(bounds)]
        return Block(tokens=tokens, begins=bool(flags & 1), ends=bool(flags & 2))

    def place(self, block: int, document: int) -> str:
        return f"{self._folder}: block {block}, document {document + 1} of {self.name}"

    def block_tokens(self, block: int) -> int:
        """Tokens of a block, without reading them."""
        shard, local = self._located(block)
        return int(shard.documents[shard.blocks[local + 1]] - shard.documents[shard.blocks[local]])
