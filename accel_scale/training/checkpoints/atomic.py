"""Folders that appear complete or not at all: staging, publishing, recovery after a kill.

Unfinished folders are written in ``<parent>/.partial/``, a name that no checkpoint search matches (`transformers`
looks for ``checkpoint-<n>``). A finished folder leaves it in a single rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

from accel_scale.training.checkpoints.manifest import MANIFEST

STAGING_FOLDER = ".partial"
_REPLACED_PREFIX = "replaced-"
# `from_pretrained` accepts no folder without one of these, so they are removed first and written last.
GATE_FILES = ("config.json", "adapter_config.json")
_OLD_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)\b.*\.(safetensors|bin|index\.json)")
_ZIP_SUFFIXES = (".pt", ".pth", ".bin")


def staging_root(parent: str | Path) -> Path:
    """Staging folder for unfinished folders of `parent`: on the same filesystem, so that a rename suffices."""
    return Path(parent) / STAGING_FOLDER


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: str | Path) -> None:
    """Force all of `folder` to disk, including pages that other processes wrote."""
    for directory, _, files in os.walk(folder):
        for name in files:
            _fsync(Path(directory, name))
        _fsync(Path(directory))


def publish(staged: str | Path, folder: str | Path) -> None:
    """Make the finished `staged` folder appear as `folder`, replacing an earlier folder of that name.

    A kill between the two renames of a replacement leaves the earlier folder in the staging area;
    `recover` puts it back.
    """
    staged, folder = Path(staged), Path(folder)
    fsync_tree(staged)
    replaced = staged.parent / f"{_REPLACED_PREFIX}{folder.name}"
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(staged, folder)
    _fsync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    with contextlib.suppress(OSError):  # another folder may still be staged here
        staged.parent.rmdir()


def publish_into(staged: str | Path, folder: str | Path) -> None:
    """Move a finished model from `staged` into `folder`, which also holds other things (checkpoints, logs).

    The configuration that makes the folder loadable is removed first and moved last, so a kill at any
    moment leaves a folder that `from_pretrained` refuses, never one with old and new weights mixed.
    """
    staged, folder = Path(staged), Path(folder)
    fsync_tree(staged)
    names = sorted(os.listdir(staged), key=lambda name: (name in GATE_FILES, name))
    for gate in GATE_FILES:
        (folder / gate).unlink(missing_ok=True)
    _fsync(folder)
    for name in os.listdir(folder):
        if _OLD_WEIGHTS.fullmatch(name) and (folder / name).is_file():
            (folder / name).unlink()
    for name in names:
        if name in GATE_FILES:
            _fsync(folder)
        if (staged / name).is_dir() and (folder / name).is_dir():
            shutil.rmtree(folder / name)
        os.replace(staged / name, folder / name)
    _fsync(folder)
    staged.rmdir()
    with contextlib.suppress(OSError):
        staged.parent.rmdir()


def recover(output_dir: str | Path) -> list[str]:
    """Clean up after a killed run of `output_dir`: call it on one process, before anything is saved.

    Folders that were being replaced are restored; unfinished folders are removed.

    Returns:
        One line per leftover, e.g. ``removed unfinished checkpoint-200``.
    """
    output_dir = Path(output_dir).absolute()
    own, beside = staging_root(output_dir), staging_root(output_dir.parent)
    leftovers = sorted(own.iterdir()) if own.is_dir() else []
    # Other runs may be saving beside `output_dir`: take only the leftovers that carry its name.
    leftovers += [p for n in (output_dir.name, f"{_REPLACED_PREFIX}{output_dir.name}") if (p := beside / n).exists()]
    done = [_recover_one(leftover) for leftover in leftovers]
    for root in (own, beside):
        with contextlib.suppress(OSError):
            root.rmdir()
    return done


def _recover_one(leftover: Path) -> str:
    original = leftover.parent.parent / leftover.name.removeprefix(_REPLACED_PREFIX)
    if leftover.name.startswith(_REPLACED_PREFIX) and not original.exists():
        os.rename(leftover, original)
        return f"put back {original.name}, which was being replaced"
    if leftover.is_dir():
        shutil.rmtree(leftover)
    else:
        leftover.unlink()
    return f"removed unfinished {leftover.name}"


def _safetensors_problem(path: Path) -> str | None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return f"{path.name} is cut off"
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return f"{path.name} has no readable header"
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    return None if size == 8 + length + end else f"{path.name} has {size} bytes instead of {8 + length + end}"


def _file_problem(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        return _safetensors_problem(path)
    if path.suffix in _ZIP_SUFFIXES and not zipfile.is_zipfile(path):  # torch.save writes the directory last
        return f"{path.name} is cut off"
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return f"{path.name} is not valid JSON"
        if path.name.endswith(".index.json"):
            missing = sorted({s for s in content.get("weight_map", {}).values() if not (path.parent / s).is_file()})
            return f"{path.name} names {missing[0]}, which is missing" if missing else None
    return None


def checkpoint_problems(folder: str | Path) -> list[str]:
    """Structural problems of a folder without a manifest: truncated files, missing shards or states.

    Reads headers only, so it takes milliseconds at any size. A checkpoint of ours is good if its manifest says so
    (`checkpoint_folders`); this is for folders written by other programs.
    """
    folder = Path(folder)
    problems = []
    # `Trainer` writes its state last, so one of its checkpoints without it is incomplete.
    is_trainers = re.fullmatch(r"checkpoint-\d+", folder.name) and not (folder / MANIFEST).exists()
    if is_trainers and not (folder / "trainer_state.json").is_file():
        problems.append("trainer_state.json is missing")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (problem := _file_problem(path)):
            problems.append(problem)
    for metadata in folder.glob("pytorch_model_fsdp_*"):
        if metadata.is_dir() and not (metadata / ".metadata").is_file():
            problems.append(f"{metadata.name}/.metadata is missing")
    tag = folder / "latest"  # DeepSpeed's name for the folder with its shards
    if tag.is_file() and not (folder / tag.read_text(encoding="utf-8").strip()).is_dir():
        problems.append("the DeepSpeed folder named in `latest` is missing")
    return problems
