"""Normalised rows kept as Arrow files in `datasets`' cache, written once and memory-mapped by every process."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.data.bad_rows import SkipLog
from accel_scale.disk_space import OUT_OF_SPACE
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features

_ROWS_FILE, _SKIPPED_FILE = "rows.arrow", "skipped_rows.jsonl"


def cache_key(files: Sequence[str], *settings: object) -> str:
    """A key that changes with the files (path, size, modification time), the settings and the code that reads them."""
    digest = files_digest(_code_digest(), files)
    digest.update(repr(settings).encode())
    return digest.hexdigest()[:32]


def _code_digest() -> bytes:
    folder = Path(__file__).parent
    names = ("bad_rows", "files", "images", "layout", "reading", "rows", "spans", "turns")
    return hashlib.sha256(b"".join((folder / f"{name}.py").read_bytes() for name in names)).digest()


def complete_folder(area: str, key: str, write: Callable[[Path], None]) -> Path:
    """The folder `key` in an area of `datasets`' cache, created by `write` if it is missing.

    Processes that ask at the same time wait for the first one, on every machine that shares the cache. A folder in the
    cache is complete: it is written under a temporary name and renamed, so a killed process leaves nothing that looks
    like data.

    Raises:
        ConfigError: if the cache cannot be written.
    """
    from datasets import config
    from filelock import FileLock

    root = Path(config.HF_DATASETS_CACHE) / area
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        if error.errno in OUT_OF_SPACE:
            raise  # a full disk has its own message
        raise ConfigError(
            f"the cache of data sets cannot be written: {root} ({error.strerror}).",
            place="HF_DATASETS_CACHE",
            fix="set it, or HF_HOME, to a folder that can be written.",
        ) from None
    folder = root / key
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            for leftover in root.glob(f"{key}.*/"):  # of a killed process: the lock is ours, so it is not running
                shutil.rmtree(leftover, ignore_errors=True)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=root))
            try:
                write(unfinished)
                os.replace(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def files_digest(seed: bytes, files: Sequence[str]) -> Any:
    """A hash that changes with the files: path, size, modification time."""
    digest = hashlib.sha256(seed)
    for file in files:
        status = os.stat(file)
        digest.update(f"{os.path.abspath(file)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest


def cached_rows(
    key: str, features: Features, tables: Callable[[SkipLog], Iterator[pa.Table]]
) -> tuple[Dataset, dict[str, int]]:
    """The rows of `tables`, from the cache if `key` is there, else written to it first.

    Returns:
        (data set memory-mapped from the cache, number of skipped rows by reason).
    """
    import pyarrow.ipc
    from datasets import Dataset

    def write(unfinished: Path) -> None:
        with pyarrow.ipc.new_stream(str(unfinished / _ROWS_FILE), features.arrow_schema) as writer:
            for table in tables(SkipLog(str(unfinished / _SKIPPED_FILE))):
                writer.write_table(table)

    folder = complete_folder("accel_scale", key, write)
    dataset = Dataset.from_file(str(folder / _ROWS_FILE))
    return dataset, SkipLog(str(folder / _SKIPPED_FILE)).reasons()
