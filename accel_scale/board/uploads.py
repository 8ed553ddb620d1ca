"""Makes dropped files safe for a command to read: small, plain YAML, without paths of this host."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from accel_scale.errors import ConfigError

MOST_BYTES = 256 * 1024
_DEEPEST, _MOST_NODES = 40, 20_000
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,80}\.(ya?ml|json)")
_SEPARATOR = re.compile(r"[/\\]")
_ODD = re.compile(r"[^\w.-]")
# Replaces the folders of a path that must not be accessed.
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Dropped:
    """A file as a command will read it.

    Attributes:
        name: Name of the file, without folders.
        text: Its text, paths replaced.
        replaced: The paths that were replaced.
    """

    name: str
    text: str
    replaced: Sequence[str]


def read_dropped(path: str | Path, *, beside: Collection[str] = ()) -> Dropped:
    """Read one file.

    Args:
        path: Where the upload lies.
        beside: Names of files that were dropped with it; a path that ends in one of them refers to that file.

    Raises:
        ConfigError: if the file is too large, not text, not named as YAML or JSON, nested too deeply, or has anchors.
    """
    path = Path(path)
    name = path.name
    if not _NAME.fullmatch(name):
        raise ConfigError("is no name of a YAML or JSON file.", place=name[:80], fix="drop a file like launch.yaml.")
    content = path.read_bytes()
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{len(content):,} bytes are too many.", place=name, fix=f"use {MOST_BYTES:,} or fewer.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("is not text in UTF-8.", place=name, fix="drop a YAML file.") from None
    return Dropped(name, *_without_paths(text, name, beside))


def _without_paths(text: str, name: str, beside: Collection[str]) -> tuple[str, list[str]]:
    """`text` with every path that leads out of its folder replaced, and the list of those paths."""
    replaced: list[str] = []
    parts: list[str] = []
    done = depth = nodes = 0
    try:
        for event in yaml.parse(text.replace("\t", "  ") if name.endswith(".json") else text, Loader=yaml.SafeLoader):
            nodes += 1
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            start, end = event.start_mark, event.end_mark
            assert start is not None  # yaml.parse gives both to every event
            assert end is not None
            line = start.line + 1
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise ConfigError("anchors are not read here.", place=f"{name}:{line}", fix="write the value itself.")
            if depth > _DEEPEST or nodes > _MOST_NODES:
                raise ConfigError("is no file of settings.", place=f"{name}:{line}", fix="drop a smaller file.")
            if not isinstance(event, yaml.ScalarEvent):
                continue
            last = _SEPARATOR.split(event.value.strip().rstrip("/\\"))[-1] or "folder"
            if is_outside(event.value) or (last != event.value and last in beside):
                inside = last if last in beside else f"{ELSEWHERE}/{_ODD.sub('_', last)}"
                replaced += [] if last in beside else [event.value]
                is_block = text[start.index : end.index].endswith("\n")
                parts += [text[done : start.index], inside, "\n" * is_block]
                done = end.index
    except yaml.YAMLError:
        return text, []  # the command reports it better, with the line; it reads nothing else from such a file
    return "".join([*parts, text[done:]]), replaced


def is_outside(value: str) -> bool:
    """True if a setting's value is a path that leads out of the folder it is read in."""
    words = _SEPARATOR.split(value)
    return len(words) > 1 and (not words[0] or words[0].startswith("~") or ".." in words or ":" in words[0])


def read_all(paths: Mapping[str, Sequence[str]]) -> dict[str, list[Dropped]]:
    """Read every file dropped on each part of the page.

    Raises:
        ConfigError: as `read_dropped`.
    """
    names = {Path(path).name for each in paths.values() for path in each}
    return {place: [read_dropped(path, beside=names) for path in each] for place, each in paths.items()}
