"""Full disks: recognised in a chain of exceptions from any library, and reported in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.units import format_bytes

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Error messages of safetensors (Rust), Arrow, SQLite and torch, which drop the errno (safetensors 0.8, pyarrow 23,
# torch 2.13: its zip writer gives no reason at all).
_WORDS = re.compile(
    r"no space left on device|disk quota exceeded|storagefull|errno 28\b|os error 28\b|file too large|disk is full|"
    r"(?P<unsaid>PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+)",
    re.IGNORECASE,
)
_LITTLE_BYTES = 64 * 2**20
# Folders that this run writes to → the setting that names each.
_written: dict[Path, str] = {}


def writes_into(folder: str | os.PathLike[str], place: str) -> None:
    """Register a folder that this run writes to, and the setting that names it, for `full_disk`."""
    _written[Path(folder)] = place


def full_disk(error: BaseException) -> ConfigError | None:
    """The error to report if `error` was caused by a full disk or a quota; None otherwise."""
    found = next((link for link in _chain(error) if _is_out_of_space(link)), None)
    if found is None:
        return None
    folder, place = _fullest(getattr(found, "filename", None))
    said = _WORDS.search(str(found))
    if said is not None and said["unsaid"] and _free(folder) > _LITTLE_BYTES:
        return None
    if getattr(found, "errno", None) == errno.EFBIG:
        problem = f"a file in {folder} would grow beyond the largest size that is allowed here (ulimit -f)"
    else:
        free = format_bytes(_free(folder))
        problem = f"the disk of {folder} is full: {free} are free, less than was being written, or a quota is used up"
    return ConfigError(
        f"{problem}. What was complete before, such as the last good checkpoint, is untouched.",
        place=place,
        fix="make room, or name a folder on another disk, and run the same command again.",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _is_out_of_space(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in OUT_OF_SPACE
    return bool(_WORDS.search(str(error)))


def _fullest(filename: object) -> tuple[Path, str]:
    """The file's folder, else the registered folder or cache with the least free space, and the setting naming it."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    caches = {
        Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser(): "HF_DATASETS_CACHE",
        Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser(): "HF_HUB_CACHE",
        Path(tempfile.gettempdir()): "TMPDIR",
    }
    known = {**caches, **_written}
    if isinstance(filename, str):
        path = Path(os.path.abspath(filename))
        for folder, place in sorted(known.items(), key=lambda item: len(item[0].parts), reverse=True):
            if Path(os.path.abspath(folder)) in path.parents:
                return folder, place
        return path.parent, str(path)
    return min(known.items(), key=lambda item: _free(item[0]))


def _free(folder: Path) -> int:
    folder = Path(os.path.abspath(folder))
    for existing in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
    return 0
