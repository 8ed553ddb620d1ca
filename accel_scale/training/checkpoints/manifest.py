"""The manifest of a checkpoint: size and checksum of every file, written last and checked before loading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError

MANIFEST = "manifest.json"
FORMAT = 1
# Prefix of the `layout` of a Trainer's checkpoints: `CheckpointManager` writes other files under the same names.
TRAINER_LAYOUT = "trainer"
_CHUNK_BYTES = 8 * 2**20
_NUM_THREADS = 8


class Damaged(Exception):
    """Raised for a checkpoint that differs from what was written; the message states the problem on one line."""


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint and its files.

    Attributes:
        step: Optimizer steps already taken.
        sequence: Numbers the checkpoints of an output folder in the order in which they were saved.
        world_size: Number of ranks that wrote it.
        strategy: The name of `strategy_of`'s result.
        layout: How the strategy wrote it, e.g. ``SHARDED_STATE_DICT``.
        seed: Seed of rank 0, from which random states of additional ranks are derived.
        stopped_by: The signal that ended the run, if any.
        versions: Versions of the libraries that wrote it.
        algorithm: Algorithm of the checksums.
        files: Path inside the folder → size in bytes and checksum.
        settings: The settings that define the run, as `checkpoint_settings` compares them; may be empty.
    """

    step: int
    sequence: int
    world_size: int
    strategy: str
    layout: str
    seed: int
    stopped_by: str | None
    versions: dict[str, str]
    algorithm: str
    files: dict[str, tuple[int, str]]
    settings: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def of_run(
        cls,
        step: int,
        *,
        world_size: int,
        strategy: str,
        layout: str,
        stopped_by: str | None,
        settings: dict[str, Any],
    ) -> Manifest:
        """Create the manifest of this process's run and libraries; files and sequence number are set when writing."""
        import torch

        return cls(
            step, 0, world_size, strategy, layout, torch.initial_seed(), stopped_by,
            library_versions(), fast_algorithm(), {}, settings,
        )  # fmt: skip


def fast_algorithm() -> str:
    """The fastest checksum algorithm installed here."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "blake2b"
    return "xxh3_128"


def _new_hash(algorithm: str) -> Any:
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=16)
    if algorithm != "xxh3_128":
        raise Damaged(f"its checksums are of an unknown kind ({algorithm!r})")
    try:
        import xxhash
    except ImportError as error:
        raise ConfigError(
            "the checkpoint's checksums need the package xxhash.", place="resume", fix="install xxhash."
        ) from error
    return xxhash.xxh3_128()


def _describe(path: Path, algorithm: str, *, sync: bool) -> tuple[int, str]:
    digest, size = _new_hash(algorithm), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return size, digest.hexdigest()


def describe_files(folder: Path, names: Iterable[str], algorithm: str, *, sync: bool) -> dict[str, tuple[int, str]]:
    """Size and checksum of each file, several at a time: both hashing and syncing release the interpreter lock.

    Args:
        folder: The checkpoint.
        names: Paths inside it.
        algorithm: The result of `fast_algorithm`.
        sync: Also force each file to disk.
    """
    names = list(names)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(lambda name: _describe(folder / name, algorithm, sync=sync), names)
        return dict(zip(names, found, strict=True))


def _own_checksum(content: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in content.items() if key != "checksum"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``, the last file of a checkpoint; `publish` forces it to disk with the others."""
    content = asdict(manifest)
    content["checksum"] = _own_checksum(content)
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of `folder`, and check that every file exists and has the right size.

    Raises:
        Damaged: if the manifest or a file is wrong.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        checksum = content.pop("checksum")
        if checksum != _own_checksum(content):
            raise Damaged(f"{MANIFEST} was changed")
        if content["format"] != FORMAT:
            raise Damaged(f"its format is {content['format']}, this version reads {FORMAT}")
        content["files"] = {name: (size, digest) for name, (size, digest) in content["files"].items()}
        manifest = Manifest(**content)
    except FileNotFoundError as error:
        raise Damaged(f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Damaged(f"{MANIFEST} cannot be read") from error
    for name, (size, _) in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name} is missing") from error
        if found != size:
            raise Damaged(f"{name} has {found} bytes instead of {size}")
    return manifest


def changed_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """One line for each of `names` whose content differs from what was written."""
    try:
        found = describe_files(folder, names, manifest.algorithm, sync=False)
    except OSError as error:
        return [f"{error.filename} cannot be read ({error.strerror})"]
    return [f"{name} was changed" for name, entry in found.items() if entry != manifest.files[name]]


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a checkpoint's format depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "accelerate", "transformers", "deepspeed", "numpy", "accel-scale"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
