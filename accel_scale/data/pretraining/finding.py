"""Find the pretraining data a user names: files, folders, globs, data sets, prepared folders, weights."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.data.mixture import parse_weight
from accel_scale.data.pretraining.blocks import BlockSource
from accel_scale.data.pretraining.prepared import PreparedSource, is_prepared, read_manifest
from accel_scale.data.sources import COMPRESSIONS, NOT_DATA, SPLIT_WORDS, Source, file_kind, find_source, looks_local
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

TEXT_DOCUMENTS = ("file", "line", "paragraph")
_KINDS = {"jsonl": ".jsonl", "text": ".txt", "parquet": ".parquet", "arrow": ".arrow"}
_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class NamedSource:
    """A source with its share.

    Args:
        label: A short name, unique within the data, that row ids begin with.
        name: As the user wrote it.
        source: Its blocks.
        weight: Share of the tokens; all shares sum to 1.
        tokenizer: Fingerprint of the tokenizer that prepared data was made with, else None.
    """

    label: str
    name: str
    source: BlockSource
    weight: float
    tokenizer: str | None = None


def find_sources(
    data: str | Sequence[str], *, text_column: str, text_documents: str, place: str = "--data"
) -> tuple[list[NamedSource], list[str]]:
    """Open the sources that `data` names.

    Args:
        data: One name or several, all with ``=weight`` or none; without weights, shares follow their bytes of text.
        text_column: Column of the text in JSON lines and tables.
        text_documents: Unit of a document in a .txt file: the ``file``, a ``line`` or a ``paragraph``.
        place: The setting that errors name.

    Returns:
        (sources, notes for the user).

    Raises:
        ConfigError: for anything that does not exist or cannot be read.
    """
    if text_documents not in TEXT_DOCUMENTS:
        raise ConfigError(
            f"{text_documents!r} is none of {', '.join(TEXT_DOCUMENTS)}.",
            place="--text_documents",
            fix="choose what one document of a .txt file is.",
        )
    items = [_weighted(item, place) for item in ([data] if isinstance(data, str) else data)]
    if not items:
        raise ConfigError("no data is named.", place=place, fix="name a file, a folder or a hub data set.")
    notes: list[str] = []
    found: list[tuple[float | None, list[NamedSource]]] = []
    for name, weight in items:
        try:
            found.append((weight, _open(name, text_column, text_documents, notes)))
        except ConfigError as error:
            if error.place in ("--data", "--dataset_name", "--dataset_config"):
                raise ConfigError(error.problem, place=place, fix=error.fix) from error
            raise
    weighted = [name for name, weight in items if weight is not None]
    if weighted and len(weighted) < len(items):
        missing = next(name for name, weight in items if weight is None)
        raise ConfigError(
            f"{weighted[0]} has a weight and {missing} has none.",
            place=place,
            fix=f"write the share of every source, such as {missing}=0.5, or of none.",
        )
    sources = [
        replace(one, weight=one.weight * (sum(other.source.size_bytes for other in group) if share is None else share))
        for share, group in found
        for one in group
    ]
    # Rounded, so that shares read back from a manifest lead to the same turns.
    total = sum(one.weight for one in sources)
    labels = _labels([one.label for one in sources])
    return [
        replace(one, label=label, weight=round(one.weight / total, 12))
        for one, label in zip(sources, labels, strict=True)
    ], notes


def _weighted(item: str, place: str) -> tuple[str, float | None]:
    name, equals, text = item.rpartition("=")
    if not equals or not name or os.path.exists(os.path.expanduser(item)):
        return item, None
    return name, parse_weight(name, text, place=place, fix=f"write its share of the tokens, such as {name}=0.5.")


def _labels(names: Sequence[str]) -> list[str]:
    """Unique names for row ids to begin with, without the characters that separate the parts of an id."""
    seen: dict[str, int] = {}
    labels = []
    for name in names:
        label = re.sub(r"[^\w.\-/]", "_", name) or "data"
        seen[label] = seen.get(label, 0) + 1
        labels.append(label if seen[label] == 1 else f"{label}.{seen[label]}")
    return labels


def _open(name: str, text_column: str, text_documents: str, notes: list[str]) -> list[NamedSource]:
    path = os.path.expanduser(name)
    if os.path.isdir(path) and is_prepared(path):
        manifest = read_manifest(path)
        return [
            NamedSource(
                told["label"],
                told["name"],
                PreparedSource(path, index, manifest),
                told["weight"],
                manifest["tokenizer"],
            )
            for index, told in enumerate(manifest["sources"])
        ]
    label = os.path.basename(path.rstrip("/")) or name
    return [NamedSource(label, name, _block_source(name, path, text_column, text_documents, notes), 1.0)]


def _block_source(name: str, path: str, text_column: str, text_documents: str, notes: list[str]) -> BlockSource:
    from accel_scale.data.pretraining.tables import TableSource, has_large_row_groups
    from accel_scale.data.pretraining.text_files import ContinuousText, JsonLines, TextLines

    kind, paths = _files(name, path, notes)
    if kind == "jsonl":
        return JsonLines(paths, text_column)
    if kind == "text":
        return (
            ContinuousText(paths)
            if text_documents == "file"
            else TextLines(paths, paragraphs=text_documents == "paragraph")
        )
    if kind == "parquet" and has_large_row_groups(paths, text_column):
        from accel_scale.data.pretraining.parquet_cache import converted_parquet

        return TableSource("arrow", name, converted_parquet(name, paths, text_column), text_column)
    return TableSource(kind, name, paths, text_column)


def _files(name: str, path: str, notes: list[str]) -> tuple[str, list[str]]:
    """(kind, files) of data that is not prepared."""
    if os.path.isfile(path):
        return _kind_of([path], name), [path]
    if os.path.isdir(path):
        if any(os.path.exists(os.path.join(path, marker)) for marker in ("dataset_dict.json", "state.json")):
            return "arrow", _saved(name, path)
        everything = [str(found) for found in sorted(Path(path).rglob("*")) if not _is_hidden(found, path)]
        root = path
    elif glob.has_magic(name):
        everything = sorted(glob.glob(path, recursive=True))
        root = os.path.commonpath([os.path.dirname(os.path.abspath(one)) for one in everything] or ["/"])
    elif looks_local(name):
        find_source(name)  # raises, suggesting the nearest name that exists
        raise AssertionError("find_source refuses what does not exist")
    else:
        return "arrow", _hub(name)
    files = [
        one
        for one in everything
        if os.path.isfile(one)
        and (file_kind(one) or one.lower().endswith(COMPRESSIONS))
        and os.path.basename(one) not in NOT_DATA
    ]
    if not files:
        raise ConfigError(
            f"{name} has no data files.", place="--data", fix=f"give files ending in {', '.join(_KINDS.values())}."
        )
    readable = [one for one in files if file_kind(one) in _KINDS or one.lower().endswith(COMPRESSIONS)] or files
    if len(readable) < len(files):
        stray = next(one for one in files if one not in readable)
        notes.append(f"{name}: {len(files) - len(readable)} files such as {stray} are left out; they are no text.")
    kept = [one for one in readable if _split_of(one, root) in (None, "train")] or readable
    if len(kept) < len(readable):
        notes.append(
            f"{name}: {len(readable) - len(kept)} files of other splits than train are left out; name them to use."
        )
    return _kind_of(kept, name), kept


def _is_hidden(path: Path, folder: str) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _split_of(path: str, root: str) -> str | None:
    """The split that is the whole name of the file or of a folder; a book called "the test" is not a test split."""
    *folders, base = os.path.relpath(os.path.abspath(path), os.path.abspath(root)).split(os.sep)
    stem = _SHARD_SUFFIX.sub("", os.path.splitext(base)[0])
    for part in (stem, *reversed(folders)):
        for split, words in SPLIT_WORDS.items():
            if part.lower() in words:
                return split
    return None


def _kind_of(files: Sequence[str], name: str) -> str:
    kinds: dict[str, str] = {}
    for path in files:
        if path.lower().endswith(COMPRESSIONS):
            raise ConfigError(
                "the file is compressed, so its documents cannot be read in any order.",
                place=path,
                fix="decompress it (gunzip, zstd -d), or convert it to Parquet, which compresses by itself.",
            )
        kind = file_kind(path)
        if kind not in _KINDS:
            raise ConfigError(
                "the file is not of a kind that pretraining reads.",
                place=path,
                fix=f"convert it to one of {', '.join(_KINDS.values())}.",
            )
        kinds.setdefault(kind, path)
    if len(kinds) > 1:
        raise ConfigError(
            f"{name} holds files of several kinds: {', '.join(kinds.values())}.",
            place="--data",
            fix="name each kind as a source of its own, such as 'folder/*.jsonl' 'folder/*.txt'.",
        )
    return next(iter(kinds))


def _saved(name: str, path: str) -> list[str]:
    from datasets import Dataset, load_from_disk

    loaded = load_from_disk(path)
    if not isinstance(loaded, Dataset):
        if "train" not in loaded:
            raise ConfigError(
                f"{name} has no split 'train'; it has {', '.join(map(repr, loaded))}.",
                place="--data",
                fix=f"name the folder of one, such as {os.path.join(name, next(iter(loaded)))}.",
            )
        loaded = loaded["train"]
    return _cached_files(name, loaded)


def _hub(name: str) -> list[str]:
    from accel_scale.data.opened import _hub_split

    hub_id, _, config = name.partition(":")
    source: Source = find_source(hub_id, config=config or None)
    return _cached_files(name, _hub_split(source, "train", False))


def _cached_files(name: str, dataset: Dataset) -> list[str]:
    """The Arrow files of a data set that consists of entire files."""
    files = [str(file["filename"]) for file in dataset.cache_files]
    if not files:
        raise ConfigError(f"{name} is not kept in Arrow files.", place="--data", fix="save it as Parquet.")
    return files
