"""Write shards of prepared data, each complete or absent, and check them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel_scale.data.pretraining.blocks import BlockSource
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.prepared import BLOCKS, DOCUMENTS, FACTS, FRAGMENTS, TOKENS, shard_folder
from accel_scale.errors import ConfigError

_PARTIAL = "partial-"


@dataclass(frozen=True)
class ShardJob:
    """Blocks [first_block, end_block) of a source become one shard."""

    source: int
    shard: int
    first_block: int
    end_block: int


def write_shard(
    folder: str,
    job: ShardJob,
    source: BlockSource,
    encoder: Encoder,
    dtype: str,
    on_block: Callable[[], None],
) -> dict[str, Any]:
    """Tokenise blocks and publish them as a shard folder, by one rename once all of it is on disk.

    Args:
        folder: The prepared data's folder.
        on_block: Called after each block; may raise to stop.

    Returns:
        The shard's facts, as in its shard.json.
    """
    final = Path(shard_folder(folder, job.source, job.shard))
    partial = final.with_name(f"{_PARTIAL}{final.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        documents, blocks, fragments = array("q", [0]), array("q", [0]), array("B")
        with open(partial / TOKENS, "wb") as file:
            for number in range(job.first_block, job.end_block):
                block = source.read(number)
                arrays = block.encode(list(range(len(block))), encoder)
                for tokens in arrays:
                    documents.append(documents[-1] + len(tokens))
                if arrays:
                    file.write(np.concatenate(arrays).astype(dtype).tobytes())
                blocks.append(blocks[-1] + len(arrays))
                fragments.append(block.begins | block.ends << 1)
                on_block()
            _synced(file)
        for name, values in ((DOCUMENTS, documents), (BLOCKS, blocks), (FRAGMENTS, fragments)):
            with open(partial / name, "wb") as file:
                file.write(np.asarray(values, dtype="u1" if name == FRAGMENTS else "<i8").tobytes())
                _synced(file)
        names = (TOKENS, DOCUMENTS, BLOCKS, FRAGMENTS)
        facts = {
            "num_blocks": job.end_block - job.first_block,
            "num_documents": len(documents) - 1,
            "num_tokens": documents[-1],
            "file_bytes": {name: os.path.getsize(partial / name) for name in names},
            "sha256": {name: _sha256(partial / name) for name in names},
        }
        with open(partial / FACTS, "w", encoding="utf-8") as text:
            json.dump(facts, text, indent=1)
            _synced(text)
        os.rename(partial, final)
        sync_folder(final.parent)
        return facts
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _synced(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's names to disk, so that a rename in it survives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finished_shard(folder: str, job: ShardJob) -> dict[str, Any] | None:
    """The facts of a shard if it exists, else None. A shard folder is always complete: it is renamed into place."""
    path = Path(shard_folder(folder, job.source, job.shard), FACTS)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def remove_partial_shards(folder: str) -> None:
    """Remove what a killed or failed run left unfinished."""
    for leftover in Path(folder).glob(f"source-*/{_PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def check_shard(folder: str, job: ShardJob, facts: dict[str, Any]) -> None:
    """Raise a ConfigError unless each file of a shard has its recorded checksum."""
    for name, expected in facts["sha256"].items():
        path = Path(shard_folder(folder, job.source, job.shard), name)
        if not path.is_file() or _sha256(path) != expected:
            raise ConfigError(
                "the file is not as it was written: its checksum differs.",
                place=str(path),
                fix=f"remove {path.parent} and {Path(folder, 'manifest.json')}, and run the same command again.",
            )
