"""Strict flags: defaults < YAML file < command line, every value checked and its origin remembered."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml

from accel_scale.errors import ConfigError
from accel_scale.facts.precisions import REFUSED_PRECISIONS
from accel_scale.flags import datasets_key
from accel_scale.flags.library import (
    FlagClass,
    FlagTable,
    LaterClass,
    NeedsLibraryError,
    add_known,
    hf_argument_parser,
    known_table,
    load_classes,
    make_table,
    remember,
)
from accel_scale.flags.ranges import check_ranges
from accel_scale.flags.yaml_file import read_mapping

CONFIG_FLAGS = ("--config_file", "--config-file", "--config")
# Keys that only an Accelerate launch file has.
_LAUNCH_FILE_KEYS = {
    "compute_environment",
    "distributed_type",
    "fsdp_config",
    "deepspeed_config",
    "machine_rank",
}
# Negative numbers that argparse itself recognises, if no flag looks like one.
_PLAINLY_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_UNSET = object()


@dataclass(frozen=True)
class ParsedFlags:
    """Flags that the user set, before any default is applied.

    Attributes:
        explicit: flag name → value, for flags given in the file or on the command line.
        origins: flag name → ``--flag`` or ``file.yaml:12``.
        config_path: the YAML file, if one was given.
        program: the recipe's file name.
    """

    explicit: dict[str, Any]
    origins: dict[str, str]
    config_path: Path | None
    program: str = ""

    def for_class(self, cls: type) -> dict[str, Any]:
        """The explicit values that belong to dataclass `cls`, as keyword arguments."""
        names = {f.name for f in dataclasses.fields(cls) if f.init}
        return {name: value for name, value in self.explicit.items() if name in names}

    def place(self, name: str) -> str:
        """Where `name` was set, or the flag itself if it has its default."""
        return self.origins.get(name, f"--{name}")


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, so that the caller can name file and line."""

    def error(self, message: str) -> NoReturn:
        for name, reason in REFUSED_PRECISIONS.items():
            if f"invalid choice: '{name}'" in message:
                message = f"--precision has no {name}: {reason}"
        raise ConfigError(message[:1].upper() + message[1:] + ".")


def build_parser(
    flag_classes: Sequence[FlagClass], *, program: str, description: str | None = None, table: FlagTable | None = None
) -> argparse.ArgumentParser:
    """An argument parser with one flag per dataclass field, as transformers' `HfArgumentParser` lays them out.

    Args:
        table: Flags of libraries, used instead of importing their classes.
    """
    parser = _Parser(
        prog=program,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        *CONFIG_FLAGS,
        dest="config_file",
        default=None,
        help="YAML file with flags; the command line wins over it.",
    )
    nullable: set[str] = set()
    for cls in flag_classes if table else load_classes(flag_classes):
        group = parser.add_argument_group(getattr(cls, "__name__", ""))
        own: tuple[type, ...] = cls.own if isinstance(cls, LaterClass) else (cls,)
        if table and isinstance(cls, LaterClass):
            replaced = {f.name for base in own for f in dataclasses.fields(base)}
            nullable |= add_known(group, table["classes"][cls.library], replaced=replaced)
        for base in own:
            nullable |= _add_fields(group, base)
    parser.set_defaults(_nullable=nullable)
    return parser


def _add_fields(group: argparse._ArgumentGroup, cls: type) -> set[str]:
    """Add one flag per field; returns the names that YAML's null may set."""
    hints = get_type_hints(cls)
    nullable = set()
    hf_parser = hf_argument_parser().HfArgumentParser
    for f in dataclasses.fields(cls):
        if f.init:
            if type(None) in get_args(hints[f.name]):
                nullable.add(f.name)
            # HfArgumentParser's own reading of a field, so that flags look and behave as in TRL's scripts
            # (checked on transformers 5.23; tests/unit/test_flags.py fails if it changes).
            f.type = hints[f.name]
            hf_parser._parse_dataclass_field(group, f)
    return nullable


def parse_flags(
    flag_classes: Sequence[FlagClass],
    argv: Sequence[str] | None = None,
    *,
    program: str,
    description: str | None = None,
) -> ParsedFlags:
    """Read `argv` (default: the process's) and the YAML file it names, without importing libraries where possible.

    Raises:
        ConfigError: unknown key, wrong type or bad choice, with file, line, key and the nearest right one; a number
            outside its flag's range; an Accelerate launch file given as the recipe's file.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    later = any(isinstance(cls, LaterClass) for cls in flag_classes)
    table = known_table(flag_classes) if later else None
    if table:
        with contextlib.suppress(NeedsLibraryError):
            return _parse(build_parser(flag_classes, program=program, description=description, table=table), argv)
    parser = build_parser(flag_classes, program=program, description=description)
    if later and not table and not known_table(flag_classes):
        remember(make_table(flag_classes, lambda classes: build_parser(classes, program="")))
    return _parse(parser, argv)


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> ParsedFlags:
    command_line = _parse_command_line(parser, argv)
    path = command_line.pop("config_file", None)
    explicit, origins = _read_yaml(parser, Path(path)) if path else ({}, {})
    explicit.update(command_line)
    origins.update({name: f"--{name}" for name in command_line})
    parsed = ParsedFlags(explicit, origins, Path(path) if path else None, parser.prog)
    check_ranges(explicit, parsed.place)
    return parsed


def _parse_command_line(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    # Sentinels instead of defaults: a value that is still a sentinel afterwards was not given.
    namespace = argparse.Namespace(**{a.dest: _UNSET for a in parser._actions if a.dest != "help"})
    try:
        namespace, unknown = parser.parse_known_args(_with_negative_numbers(argv), namespace)
    except ConfigError as error:
        raise ConfigError(error.problem, place="command line", fix=f"see {parser.prog} --help.") from None
    if unknown:
        raise _unknown(parser, unknown[0].split("=")[0].lstrip("-"), place=f"command line, {unknown[0]}", dashes="--")
    return {name: value for name, value in vars(namespace).items() if value is not _UNSET and name != "_nullable"}


def _with_negative_numbers(argv: Sequence[str]) -> list[str]:
    """``--flag -1e-4`` as ``--flag=-1e-4``: argparse mistakes unusual negative numbers for flags.

    Plain ones stay as they are, since more values may follow: ``--flag -1 1``.
    """
    words: list[str] = []
    for word in argv:
        is_odd = word.startswith("-") and _is_number(word) and not _PLAINLY_NEGATIVE.fullmatch(word)
        if is_odd and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] = f"{words[-1]}={word}"
        else:
            words.append(word)
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _unknown(parser: argparse.ArgumentParser, key: str, *, place: str, dashes: str = "") -> ConfigError:
    names = sorted({a.dest for a in parser._actions})
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1, cutoff=0.5)
    fix = f"did you mean {dashes}{near[0]}?" if near else f"see {parser.prog} --help for every flag."
    return ConfigError(f"{key!r} is not a flag of {parser.prog}.", place=place, fix=fix)


def _read_yaml(parser: argparse.ArgumentParser, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    explicit: dict[str, Any] = {}
    origins: dict[str, str] = {}
    known = {action.dest for action in parser._actions}
    for key, place, value_node in read_mapping(path):
        refuse_launch_key(parser, key, place=place, path=path)
        if key == datasets_key.KEY and key not in known and known.issuperset(datasets_key.FLAGS):
            for flag, words in datasets_key.flags_of_datasets(value_node, path).items():
                if flag in explicit:
                    raise ConfigError(
                        f"{flag!r} is given twice.", place=place, fix=f"keep one (the other: {origins[flag]})."
                    )
                explicit[flag], origins[flag] = words, place
            continue
        if key in explicit:
            raise ConfigError(f"{key!r} is given twice.", place=place, fix=f"keep one (the other: {origins[key]}).")
        explicit[key] = parse_entry(parser, key, value_node, place)
        origins[key] = place
    return explicit, origins


def refuse_launch_key(parser: argparse.ArgumentParser, key: str, *, place: str, path: Path) -> None:
    """Refuse a key of an Accelerate launch file in a recipe's file."""
    if key in _LAUNCH_FILE_KEYS and not any(a.dest == key for a in parser._actions):
        raise ConfigError(
            f"{key!r} belongs to an Accelerate launch file, not to a recipe.",
            place=place,
            fix=f"pass it to the launcher: accelerate launch --config_file {path} recipes/{parser.prog} …",
        )


def parse_entry(parser: argparse.ArgumentParser, key: str, node: yaml.Node, place: str) -> Any:
    """Parse one YAML entry by the argparse action of its flag, so types and choices are checked in the same way."""
    action = next((a for a in parser._actions if a.dest == key and f"--{key}" in a.option_strings), None)
    if action is None or key in ("config_file", "help"):
        raise _unknown(parser, key, place=place)
    tokens = _tokens(node, key, place)
    if tokens is None:
        if key in parser.get_default("_nullable"):
            return None
        raise ConfigError(f"{key!r} cannot be empty.", place=place, fix="give it a value or remove the line.")
    if action.nargs not in ("+", "*") and len(tokens) != 1:
        raise ConfigError(f"{key!r} takes one value, not a list.", place=place, fix=f"write `{key}: value`.")
    if not tokens:
        return []
    try:
        # `--key=value` keeps a value such as `-1` from being read as another flag.
        args = [f"--{key}={tokens[0]}"] if action.nargs not in ("+", "*") else [f"--{key}", *tokens]
        return getattr(parser.parse_args(args), key)
    except ConfigError as error:
        problem = error.problem.split(": ", 1)[-1].rstrip(".")
        fix = "use a value of the flag's type."
        if action.choices:
            choices = [str(getattr(c, "value", c)) for c in action.choices]
            near = difflib.get_close_matches(tokens[0], choices, n=1, cutoff=0.4)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(choices)}."
        raise ConfigError(f"{key}: {problem}.", place=place, fix=fix) from None


def _tokens(node: yaml.Node, key: str, place: str) -> list[str] | None:
    """The entry as the command line would have it; `None` for YAML's null.

    Scalars keep the text they were written with, so `eval_strategy: no` stays `no` and is not turned into False.
    """
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else [node.value]
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ConfigError(f"{key!r} takes a list of plain values.", place=place, fix="one value per item.")
        return [item.value for item in node.value]
    loader = yaml.SafeLoader("")
    try:
        return [json.dumps(loader.construct_document(node))]
    finally:
        loader.dispose()
