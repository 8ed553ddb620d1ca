"""Data sources: local files, a saved data set or a hub id, and which of its files belong to which split."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError

# How a file is read, by its extension without a compression suffix.
FILE_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSIONS = (".gz", ".bz2", ".zst")
COMPRESSIBLE = ("jsonl", "json", "csv", "text")
# Files beside the data that are not data, written by `datasets` and the hub.
NOT_DATA = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "README.txt",
}
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}.*$")


@dataclass(frozen=True)
class Source:
    """One place rows come from.

    Args:
        name: As the user wrote it.
        kind: ``files``, ``saved`` (a `datasets.save_to_disk` folder) or ``hub``.
        splits: For ``files``: split name → paths, sorted.
        config: Hub configuration name.
    """

    name: str
    kind: str
    splits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    config: str | None = None

    def files(self, split: str) -> tuple[str, ...]:
        """The files of one split; raises a ConfigError that lists the existing splits if it is not one of them."""
        splits = dict(self.splits)
        name = canonical_split(split)
        if name not in splits:
            raise missing_split(self.name, split, list(splits))
        return splits[name]


class MissingSplit(ConfigError):
    """A source does not have the split asked for."""


def missing_split(source: str, split: str, available: list[str]) -> MissingSplit:
    """The error for a split that a source does not have."""
    return MissingSplit(
        f"{source} has no split {split!r}; it has {', '.join(map(repr, available))}.",
        place="--dataset_train_split / --dataset_test_split",
        fix="name one of them, or cut one in two, e.g. --dataset_train_split 'train[:95%]' "
        "--dataset_test_split 'train[95%:]'.",
    )


def canonical_split(split: str) -> str:
    """``dev`` → ``validation``, ``training`` → ``train``, …; other names stay as they are."""
    for name, words in SPLIT_WORDS.items():
        if split in words:
            return name
    return split


def file_kind(path: str) -> str | None:
    """``jsonl``, ``json``, ``csv``, ``parquet``, ``arrow`` or ``text``; None if `path` is not data."""
    base = os.path.basename(path)
    stem, extension = os.path.splitext(base)
    compressed = extension.lower() in COMPRESSIONS
    if compressed:
        extension = os.path.splitext(stem)[1]
    kind = FILE_KINDS.get(extension.lower())
    return None if compressed and kind not in COMPRESSIBLE else kind


def looks_local(name: str) -> bool:
    """True if `name` can only be a path: a data file's extension, a leading ``.``, ``/`` or ``~``, …"""
    if name.startswith(("/", "./", "../", "~", ".\\")) or name in (".", "..") or "\\" in name:
        return True
    if file_kind(name) or glob.has_magic(name) or os.path.splitext(name)[1].lower() in COMPRESSIONS:
        return True
    first, _, rest = name.partition("/")
    return bool(rest) and ("/" in rest or os.path.isdir(first))


def find_source(name: str, *, config: str | None = None) -> Source:
    """Decide what `name` is and list its files.

    Raises:
        ConfigError: a path that does not exist (named with the nearest one that does), a folder without data,
            or a name that is neither a path nor a hub id.
    """
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        if file_kind(path) is None:
            raise ConfigError(
                f"{name} is not a kind of file that can be read as data.",
                place="--dataset_name",
                fix=f"use one of {', '.join(FILE_KINDS)} (text kinds also with {', '.join(COMPRESSIONS)}).",
            )
        source = Source(name, "files", (("train", (path,)),))
    elif os.path.isdir(path):
        source = _folder_source(name, path)
    elif glob.has_magic(name):
        source = _glob_source(name, path)
    elif looks_local(name):
        raise _no_such_path(name, path)
    elif not _HUB_ID.match(name):
        raise ConfigError(
            f"{name!r} is neither a local path nor a hub id.",
            place="--dataset_name",
            fix="write an existing path, or a hub id such as tatsu-lab/alpaca.",
        )
    else:
        return Source(name, "hub", config=config)
    if config is not None:
        raise ConfigError(
            f"{name} is local and has no configurations, so {config!r} means nothing.",
            place="--dataset_config",
            fix="remove --dataset_config.",
        )
    return source


def _no_such_path(name: str, path: str) -> ConfigError:
    folder = os.path.dirname(path) or "."
    missing = os.path.basename(path.rstrip("/"))
    while not os.path.isdir(folder):
        missing, folder = os.path.basename(folder.rstrip("/")), os.path.dirname(folder.rstrip("/")) or "."
    siblings = os.listdir(folder)
    near = difflib.get_close_matches(missing, siblings, n=1, cutoff=0.7)
    if near:
        found = os.path.join(folder, near[0]) if folder != "." or path.startswith("./") else near[0]
        fix = f"did you mean {found}?"
    else:
        fix = f"look into {folder}, which has nothing of a similar name."
    return ConfigError(f"{name} does not exist.", place="--dataset_name", fix=fix)


def _folder_source(name: str, path: str) -> Source:
    for marker in ("dataset_dict.json", "state.json"):
        if os.path.exists(os.path.join(path, marker)):
            return Source(name, "saved")
    files = sorted(
        found
        for found in glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
        if os.path.isfile(found) and file_kind(found) and os.path.basename(found) not in NOT_DATA
    )
    if not files:
        raise ConfigError(
            f"the folder {name} has no data files.",
            place="--dataset_name",
            fix=f"put files with one of these extensions in it: {', '.join(FILE_KINDS)}.",
        )
    return Source(name, "files", _by_split(files, root=path, fallback_to_train=False))


def _glob_source(name: str, path: str) -> Source:
    files = sorted(found for found in glob.glob(path, recursive=True) if os.path.isfile(found) and file_kind(found))
    if not files:
        raise ConfigError(
            f"no data file matches {name}.",
            place="--dataset_name",
            fix=f"check the pattern; files end in one of {', '.join(FILE_KINDS)}.",
        )
    # The fixed part of the pattern says nothing about splits; only the matched part does.
    root = os.path.commonpath([os.path.dirname(os.path.abspath(found)) for found in files])
    return Source(name, "files", _by_split(files, root=root, fallback_to_train=True))


def _by_split(files: list[str], *, root: str, fallback_to_train: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Group files by the split in their name or folder; files without one are ``train`` unless others say they are.

    `fallback_to_train`: if no file would be ``train``, all of them are (the pattern was meant to match only test
    files).
    """
    told: dict[str, list[str]] = {}
    untold: list[str] = []
    for file in files:
        split = _split_of(os.path.relpath(os.path.abspath(file), os.path.abspath(root)))
        (told.setdefault(split, []) if split else untold).append(file)
    if untold and "train" not in told:
        told["train"] = untold
    if "train" not in told and fallback_to_train:
        return (("train", tuple(files)),)
    return tuple(sorted((split, tuple(found)) for split, found in told.items()))


def _split_of(relative_path: str) -> str | None:
    """The split that a path within a folder indicates: by the file's name, then by its folders, innermost first."""
    *folders, base = relative_path.split(os.sep)
    # train_sft-00000-of-00004.parquet and the like: the part before the shard number is the split.
    shard = _SHARD_SUFFIX.sub("", base)
    if shard != base:
        return canonical_split(shard)
    for part in [base, *reversed(folders)]:
        tokens = [token for token in re.split(r"[-._ \d]+", part.lower()) if token]
        for name, words in SPLIT_WORDS.items():
            if any(token in words for token in tokens):
                return name
    return None


def check_saved(name: str) -> None:
    """Refuse a folder of `save_to_disk` that lacks a file it refers to; does not need `datasets`.

    Raises:
        ConfigError: naming the file.
    """
    for state in Path(name).expanduser().rglob("state.json"):
        try:
            files = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for file in files:
            if not (state.parent / file).is_file():
                raise not_whole(name, f"there is no {state.parent / file}")


def not_whole(name: str, why: str) -> ConfigError:
    """The error for an incomplete folder of `save_to_disk`."""
    return ConfigError(
        f"{name} is not a whole folder of `save_to_disk` ({why}).",
        place="--dataset_name",
        fix="save the data set again, or copy all of its folder.",
    )
