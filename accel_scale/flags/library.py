"""Flags of the libraries' dataclasses, known without importing them: a table, and the versions it was made from.

TRL's classes import torch and transformers, which takes almost ten seconds; a mistyped flag should not wait for that.
The table holds the arguments that argparse needs for every flag. It is used only for the exact versions it was made
from; under others the classes are imported, and their table is kept in the user's cache for the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NotRequired, TypeAlias, TypedDict

from accel_scale.cycles import cycles_kept

# Written by `python -m accel_scale.flags.sft`.
SHIPPED = Path(__file__).parents[1] / "assets" / "library_flags.json"
# Libraries whose versions determine which flags exist.
_LIBRARIES = ("trl", "transformers")
_PLAIN_TYPES: dict[str, Callable[[str], object]] = {"str": str, "int": int, "float": float}


class NeedsLibraryError(Exception):
    """Raised for a value that only the library's own type can read."""


@dataclass(frozen=True)
class LaterClass:
    """A dataclass of flags that is imported when it is used, because its library is slow to import.

    Attributes:
        name: ``module:Class``.
        library: ``module:Class`` of the library's class: the class itself, or the one that it extends.
        own: Its other bases, light dataclasses with our flags and our defaults for the library's.
    """

    name: str
    library: str
    own: tuple[type, ...] = field(default=())

    @property
    def __name__(self) -> str:
        """The name of the class."""
        return self.name.partition(":")[2]

    def load(self) -> type:
        """The class itself."""
        return _load(self.name)


FlagClass: TypeAlias = type | LaterClass


class Flag(TypedDict):
    """Arguments for `add_argument`. A type of None means text that only the library can read."""

    names: list[str]
    dest: str
    type: str | None
    nargs: str | None
    const: str | int | float | bool | None
    choices: list[str] | None
    default: str | int | float | bool | list[str] | None
    help: NotRequired[str | None]  # tables kept by earlier versions have none


class ClassFlags(TypedDict):
    """The flags of one class, and the names among them that YAML's null may set."""

    flags: list[Flag]
    nullable: list[str]


class FlagTable(TypedDict):
    """``module:Class`` → its flags."""

    versions: dict[str, str]
    classes: dict[str, ClassFlags]


def load_classes(classes: Iterable[FlagClass]) -> tuple[type, ...]:
    """Import all classes, without garbage collection: imports allocate much and free little, so that saves a sixth."""
    with cycles_kept():
        return tuple(cls.load() if isinstance(cls, LaterClass) else cls for cls in classes)


def hf_argument_parser() -> ModuleType:
    """transformers' `hf_argparser`, without the rest of transformers, which takes a second to import.

    Checked on transformers 5.23; if a version's module needs more, transformers is imported as a whole.
    """
    if "transformers.hf_argparser" not in sys.modules:
        spec = importlib.util.find_spec("transformers")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            with contextlib.suppress(ImportError, OSError):
                return _module_at(Path(folder) / "hf_argparser.py")
    return importlib.import_module("transformers.hf_argparser")


@functools.cache
def _module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("accel_scale_hf_argparser", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def known_table(classes: Iterable[FlagClass] = ()) -> FlagTable | None:
    """The table of the installed versions, from the shipped one and the user's cache, if it has all of `classes`."""
    versions = _versions()
    found: dict[str, ClassFlags] = {}
    for path in (_cache_path(), SHIPPED):
        with contextlib.suppress(OSError, ValueError):
            table: FlagTable = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(table, dict) and table.get("versions") == versions:
                found |= table["classes"]
    needed = {cls.library for cls in classes if isinstance(cls, LaterClass)}
    return {"versions": versions, "classes": found} if found and needed <= found.keys() else None


def add_known(parser: argparse._ArgumentGroup, known: ClassFlags, *, replaced: Collection[str]) -> set[str]:
    """Add the flags of a table except those in `replaced`; returns the names that YAML's null may set."""
    for flag in known["flags"]:
        if flag["dest"] in replaced:
            continue
        if flag["nargs"] == "0":  # --no_flag
            parser.add_argument(
                *flag["names"],
                dest=flag["dest"],
                action="store_false",
                default=flag["default"],
                help=flag.get("help"),
            )
            continue
        parser.add_argument(
            *flag["names"],
            dest=flag["dest"],
            type=_reader(flag["type"]),
            nargs=flag["nargs"],
            const=flag["const"],
            choices=flag["choices"],
            default=flag["default"],
            help=flag.get("help"),
        )
    return set(known["nullable"]) - set(replaced)


def _reader(name: str | None) -> Callable[[str], object]:
    if name == "bool":
        reader: Callable[[str], object] = hf_argument_parser().string_to_bool
        return reader
    return _only_library if name is None else _PLAIN_TYPES[name]


def _only_library(text: str) -> object:
    raise NeedsLibraryError(text)


# ── Made from the classes ────────────────────────────────────────────────────────────────────────────────────────────


def make_table(
    classes: Iterable[FlagClass], parser_of: Callable[[Sequence[type]], argparse.ArgumentParser]
) -> FlagTable:
    """Make the table from the libraries' classes that `classes` are or extend; imports them."""
    names = dict.fromkeys(cls.library for cls in classes if isinstance(cls, LaterClass))
    return {"versions": _versions(), "classes": {name: _flags_of(parser_of([_load(name)])) for name in names}}


def remember(table: FlagTable) -> None:
    """Store `table` for the next time, added to earlier ones, if the user's cache can be written.

    An installation from a checkout can change its flags without changing its version, so it gets no table.
    """
    if any("dev" in version or "+" in version for version in table["versions"].values()):
        return
    kept = known_table()
    if kept:
        table = {"versions": table["versions"], "classes": {**kept["classes"], **table["classes"]}}
    path = _cache_path()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(table), encoding="utf-8")
        unfinished.replace(path)


def _flags_of(parser: argparse.ArgumentParser) -> ClassFlags:
    actions = [action for action in parser._actions if action.dest not in ("help", "config_file")]
    return {"flags": [_flag(action) for action in actions], "nullable": sorted(parser.get_default("_nullable"))}


def _flag(action: argparse.Action) -> Flag:
    default = action.default
    if isinstance(default, (list, tuple)):
        default = [str(item) for item in default]
    reads = getattr(action.type, "__name__", "str")
    named = {"string_to_bool": "bool", "<lambda>": "str", **{name: name for name in _PLAIN_TYPES}}  # a choice's lambda
    return {
        "names": list(action.option_strings),
        "dest": action.dest,
        "type": named.get(reads),
        "nargs": None if action.nargs is None else str(action.nargs),
        "const": action.const,
        "choices": None if action.choices is None else [str(choice) for choice in action.choices],
        "default": getattr(default, "value", default),
        "help": action.help,
    }


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def _cache_path() -> Path:
    from accel_scale.network.link_fit import default_path

    return default_path().with_name("library_flags.json")


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
