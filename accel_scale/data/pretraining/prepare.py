"""Tokenise pretraining data once, into memory-mapped shards that train exactly like the data itself."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.data.loaders import available_cores
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.finding import NamedSource, find_sources
from accel_scale.data.pretraining.prepare_workers import run_jobs
from accel_scale.data.pretraining.prepared import FORMAT_VERSION, MANIFEST, PLAN, PreparedSource
from accel_scale.data.pretraining.shards import (
    ShardJob,
    check_shard,
    finished_shard,
    remove_partial_shards,
    sync_folder,
)
from accel_scale.disk_space import OUT_OF_SPACE
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A 64th of the data, so that all cores have work and little is lost with an unfinished shard.
_SHARDS, _MIN_SHARD_BYTES, _MAX_SHARD_BYTES = 64, 1 << 20, 256 << 20
_SMALL_VOCABULARY = 1 << 16
_PACKAGES = ("accel-scale", "tokenizers", "transformers", "datasets", "numpy")
_LOCK_SECONDS = 30


@dataclass(frozen=True)
class PreparedSummary:
    """Summary of what was prepared.

    Args:
        folder: Its folder, to be named as data.
        num_tokens, num_documents, num_shards: In all sources together.
        num_kept_shards: Shards finished by an earlier run; their checksums were compared.
        token_bytes: Size of the tokens on disk.
        seconds: Time it took.
    """

    folder: str
    num_tokens: int
    num_documents: int
    num_shards: int
    num_kept_shards: int
    token_bytes: int
    seconds: float


def prepare_data(
    data: str | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str,
    text_column: str = "text",
    text_documents: str = "file",
    num_workers: int | None = None,
) -> PreparedSummary:
    """Tokenise `data` into `output_dir`, which `open_pretraining_data` then reads in place of `data`.

    The blocks stay the same, so training from the folder sees the same rows in the same order. Run again after a kill
    or a full disk, it keeps the finished shards and does the rest; run again on a finished folder, it compares
    checksums. The tokenizer is saved in the folder ``tokenizer`` beside the shards.

    Args:
        data, text_column, text_documents: As for `open_pretraining_data`.
        tokenizer: The tokenizer that the training run will use.
        output_dir: A new folder, or one that the same call started.
        num_workers: Processes that tokenise; None: one per core.

    Raises:
        ConfigError: data that cannot be read, a folder with other data, a full disk (finished shards are kept).
    """
    from filelock import FileLock, Timeout

    started = time.perf_counter()
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"{num_workers} processes do nothing.", place="--num_workers", fix="give 1 or more.")
    sources, _ = find_sources(data, text_column=text_column, text_documents=text_documents)
    for named in sources:
        if isinstance(named.source, PreparedSource):
            raise ConfigError(
                f"{named.name} is prepared already.", place="--data", fix="name the data it was made of."
            )
    encoder = Encoder(tokenizer)
    folder = Path(output_dir)
    other = _other_thing(folder)
    if other is not None:
        raise ConfigError(
            f"the folder {folder} has other things in it ({other}).",
            place="--output",
            fix="name a new or an empty folder.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(str(folder / ".lock"), timeout=_LOCK_SECONDS):
            return _prepare(folder, sources, encoder, num_workers or available_cores(), started)
    except Timeout:
        raise ConfigError(
            f"another process is preparing {folder}.", place="--output", fix="wait for it, or name another folder."
        ) from None


def _other_thing(folder: Path) -> str | None:
    if not folder.is_dir() or (folder / PLAN).exists():
        return None
    return next((name for name in sorted(os.listdir(folder)) if not name.startswith(".")), None)  # a lock may be there


def _prepare(
    folder: Path, sources: Sequence[NamedSource], encoder: Encoder, num_workers: int, started: float
) -> PreparedSummary:
    dtype = "<u2" if encoder.vocab_size <= _SMALL_VOCABULARY else "<u4"
    plan = _plan(sources, encoder, dtype)
    _check_plan(folder, plan)
    remove_partial_shards(str(folder))
    jobs = [job for index, named in enumerate(sources) for job in _jobs(index, named)]
    kept: dict[ShardJob, dict[str, Any]] = {}
    for job in jobs:
        facts = finished_shard(str(folder), job)
        if facts is not None:
            check_shard(str(folder), job, facts)
            kept[job] = facts
    finished = dict(kept)
    try:
        if not (folder / PLAN).exists():
            _write_json(folder / PLAN, plan)
            encoder.tokenizer.save_pretrained(folder / "tokenizer")
        todo = [job for job in jobs if job not in finished]
        finished |= run_jobs(
            str(folder), todo, [named.source for named in sources], encoder, dtype, num_workers=num_workers
        )
        if not (folder / MANIFEST).exists() or todo:
            _write_json(folder / MANIFEST, _manifest(plan, sources, finished))
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        num_finished = sum(finished_shard(str(folder), job) is not None for job in jobs)
        raise ConfigError(
            f"there is no space left for {folder} ({error.strerror}): {num_finished} of {len(jobs)} shards are "
            "finished and kept.",
            place="--output",
            fix="free space and run the same command again; it does the rest only.",
        ) from error
    finally:
        remove_partial_shards(str(folder))
    return PreparedSummary(
        folder=str(folder),
        num_tokens=sum(facts["num_tokens"] for facts in finished.values()),
        num_documents=sum(facts["num_documents"] for facts in finished.values()),
        num_shards=len(jobs),
        num_kept_shards=len(kept),
        token_bytes=sum(facts["file_bytes"]["tokens.bin"] for facts in finished.values()),
        seconds=time.perf_counter() - started,
    )


def _jobs(index: int, named: NamedSource) -> list[ShardJob]:
    """Shards of a source, from its size alone: a resumed run may have a different number of workers."""
    source = named.source
    shard_bytes = min(max(source.size_bytes // _SHARDS, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
    step = max(1, shard_bytes * source.num_blocks // max(1, source.size_bytes))
    starts = range(0, source.num_blocks, step)
    return [ShardJob(index, shard, start, min(start + step, source.num_blocks)) for shard, start in enumerate(starts)]


def _plan(sources: Sequence[NamedSource], encoder: Encoder, dtype: str) -> dict[str, Any]:
    """Everything that determines the contents of the shards."""
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer": encoder.fingerprint(),
        "dtype": dtype,
        "sources": [
            {
                "name": named.name,
                "label": named.label,
                "weight": named.weight,
                "kind": named.source.kind,
                "size_bytes": named.source.size_bytes,
                "num_blocks": named.source.num_blocks,
                "continuous": named.source.continuous,
                "files": _files_digest(getattr(named.source, "paths", ())),
            }
            for named in sources
        ],
    }


def _files_digest(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        status = os.stat(path)
        digest.update(f"{os.path.basename(path)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _check_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Raise a ConfigError if the folder was started with something else."""
    if not (folder / PLAN).exists():
        return
    before = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    if before == plan:
        return
    changed = "the tokenizer" if before.get("tokenizer") != plan["tokenizer"] else "the data"
    raise ConfigError(
        f"{folder} was started with something else: {changed} changed.",
        place="--output",
        fix="name another folder, or remove this one.",
    )


def _manifest(
    plan: dict[str, Any], sources: Sequence[NamedSource], finished: dict[ShardJob, dict[str, Any]]
) -> dict[str, Any]:
    described = []
    for index, told in enumerate(plan["sources"]):
        shards = [finished[job] for job in _jobs(index, sources[index])]
        totals = {name: sum(facts[name] for facts in shards) for name in ("num_tokens", "num_documents")}
        described.append({**told, **totals, "shards": shards})
    return {
        **plan,
        "sources": described,
        "num_tokens": sum(one["num_tokens"] for one in described),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file atomically: it is complete or absent."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path.parent)
