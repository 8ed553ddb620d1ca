"""Read an Accelerate launch file strictly: every key known, every line remembered, the strategy derived."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accel_scale.errors import ConfigError
from accel_scale.launching.launch_keys import (
    DISTRIBUTED_TYPES,
    LAUNCH_ONLY_KEYS,
    MIXED_PRECISIONS,
    RECIPE_KEYS,
    SECTION_KEYS,
    TOP_KEYS,
    SourceFile,
)
from accel_scale.launching.strategy import LaunchStrategy, deepspeed_config_of, launch_strategy
from accel_scale.shipped import named_launch_file


@dataclass(frozen=True)
class LaunchFile(SourceFile):
    """An Accelerate launch file and what it asks for.

    Attributes:
        parallel: How the run is split and what is offloaded.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``; None if the file leaves it to the recipe.
        num_processes: Processes of all nodes together; None if the file does not say.
        deepspeed_file: The DeepSpeed configuration that the launch file names.
    """

    parallel: LaunchStrategy
    mixed_precision: str | None
    num_processes: int | None
    deepspeed_file: SourceFile | None = None

    @property
    def strategy(self) -> str:
        """The strategy's name in `facts.strategies`."""
        return self.parallel.name

    @property
    def local_world_size(self) -> int | None:
        """Processes on each node."""
        return (
            None
            if self.num_processes is None
            else max(1, self.num_processes // (self.values.get("num_machines") or 1))
        )

    @property
    def file_values(self) -> dict[str, Any]:
        """The file's keys, as written."""
        return self.values

    def place(self, key: str) -> str:
        """``path:line`` of `key`; DeepSpeed's own keys may be in DeepSpeed's file."""
        if self.deepspeed_file is not None and key not in self.lines and not key.startswith("deepspeed_config"):
            root = key.partition(".")[0]
            if root in self.deepspeed_file.values:
                return self.deepspeed_file.place(key)
        return super().place(key)


def read_launch_file(path: str | Path) -> LaunchFile:
    """Read and check the launch file at `path`; `accelerate launch` itself ignores keys that it does not know.

    Args:
        path: Path of a file, or the name of one that comes with the package, such as ``fsdp2``.

    Raises:
        ConfigError: unreadable, not YAML, a recipe's file, an unknown or repeated key, a value of the wrong type.
    """
    path = named_launch_file(path)
    source = read_source_file(path)
    _refuse_recipe(source)
    _check_keys(source)
    _check_values(source)
    values = source.values
    deepspeed_file = _deepspeed_file(source)
    parallel = launch_strategy(values, deepspeed_config_of(values.get("deepspeed_config") or {}, deepspeed_file))
    num_processes = values.get("num_processes")
    if num_processes is None and values["distributed_type"] == "NO":
        num_processes = 1
    return LaunchFile(
        path=path,
        values=values,
        lines=source.lines,
        parallel=parallel,
        mixed_precision=values.get("mixed_precision") or ("fp16" if values.get("fp16") else None),
        num_processes=None if num_processes == -1 else num_processes,
        deepspeed_file=deepspeed_file,
    )


def looks_like_launch_file(values: Mapping[str, Any]) -> bool:
    """True if the keys of a YAML file are those of an Accelerate launch file."""
    return not LAUNCH_ONLY_KEYS.isdisjoint(values)


def read_source_file(path: Path) -> SourceFile:
    """A YAML (or JSON, which is YAML) mapping with the line of every key.

    Raises:
        ConfigError: unreadable, not YAML, not a mapping, a key given twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # JSON may be indented with tabs and hold 1e8-style numbers that YAML reads as text.
        root = yaml.compose(text.replace("\t", "  ") if path.suffix == ".json" else text, Loader=yaml.SafeLoader)
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}).", place=str(path), fix="check the path.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON: {error.msg}.", place=f"{path}:{error.lineno}", fix="fix the syntax of this line."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not text in UTF-8"
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"not valid YAML: {problem}.", place=place, fix="fix the syntax of this line.") from None
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise ConfigError("holds no settings.", place=str(path), fix="write one `key: value` per line.")
    lines: dict[str, int] = {}
    _collect_lines(root, "", lines, path)
    return SourceFile(path, values, lines)


def _collect_lines(node: yaml.MappingNode, prefix: str, lines: dict[str, int], path: Path) -> None:
    for key_node, value_node in node.value:
        key, line = prefix + str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(
                f"{key!r} is given twice (the other: line {lines[key]}).",
                place=f"{path}:{line}",
                fix="keep one of them.",
            )
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode):
            _collect_lines(value_node, f"{key}.", lines, path)


def _refuse_recipe(source: SourceFile) -> None:
    if looks_like_launch_file(source.values):
        return
    recipe_key = next((key for key in source.values if key in RECIPE_KEYS), None)
    if recipe_key is not None:
        raise ConfigError(
            f"{recipe_key!r} is a recipe's flag: this is a recipe's file, not a launch file.",
            place=source.place(recipe_key),
            fix=f"pass it to the recipe: accelerate launch recipes/sft.py --config_file {source.path}",
        )


def _check_keys(source: SourceFile) -> None:
    for key in source.values:
        if key not in TOP_KEYS:
            raise _unknown_key(source, key, key, TOP_KEYS)
    for section, known in SECTION_KEYS.items():
        content = source.values.get(section) or {}
        if not isinstance(content, dict):
            raise ConfigError(
                f"{section!r} must hold keys.", place=source.place(section), fix="indent its keys under it."
            )
        for key in content:
            # accelerate adds the prefix itself, in this section only.
            full = f"fsdp_{key}" if section == "fsdp_config" and not str(key).startswith("fsdp") else str(key)
            if full not in known:
                raise _unknown_key(source, f"{section}.{key}", full, known)


def _unknown_key(source: SourceFile, dotted: str, key: str, known: frozenset[str]) -> ConfigError:
    section, _, shown = dotted.rpartition(".")
    home = next((name for name, keys in SECTION_KEYS.items() if shown in keys), None)
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    if home and home != section:
        fix = f"move it under {home}."
    elif section and shown in TOP_KEYS:
        fix = "move it to the left margin."
    else:
        fix = f"did you mean {near[0]!r}?" if near else "remove it."
    where = f"in {section} of a launch file" if section else "in a launch file"
    return ConfigError(f"{shown!r} has no meaning {where}.", place=source.place(dotted), fix=fix)


def _check_values(source: SourceFile) -> None:
    values = source.values
    environment = values.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment {environment!r} is not supported.",
            place=source.place("compute_environment"),
            fix="write LOCAL_MACHINE.",
        )
    if "distributed_type" not in values:
        raise ConfigError(
            "distributed_type is missing.",
            place=str(source.path),
            fix=f"add distributed_type: one of {', '.join(DISTRIBUTED_TYPES)} ('NO' in quotes).",
        )
    _check_choice(source, "distributed_type", DISTRIBUTED_TYPES, "NO")
    if values.get("mixed_precision") is not None:
        _check_choice(source, "mixed_precision", MIXED_PRECISIONS, "no")
    for key in ("num_processes", "num_machines", "machine_rank", "main_process_port"):
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(
                f"{key} must be a whole number, not {value!r}.",
                place=source.place(key),
                fix=f"write it like {key}: 2.",
            )


def _check_choice(source: SourceFile, key: str, choices: tuple[str, ...], false_text: str) -> None:
    value = source.values[key]
    if value is False:
        raise ConfigError(
            f"YAML reads an unquoted {false_text} as false.",
            place=source.place(key),
            fix=f"write {key}: '{false_text}'.",
        )
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(choices)}."
        raise ConfigError(f"{key} {value!r} is unknown.", place=source.place(key), fix=fix)


def _deepspeed_file(source: SourceFile) -> SourceFile | None:
    name = (source.values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if not name:
        return None
    return read_deepspeed_file(
        str(name), [Path.cwd()], source.path, place=source.place("deepspeed_config.deepspeed_config_file")
    )


def read_deepspeed_file(name: str, folders: Sequence[Path], launch_file: Path | None, *, place: str) -> SourceFile:
    """DeepSpeed's configuration, relative to one of `folders` or to a folder above the launch file, nearest first."""
    above = launch_file.resolve().parents if launch_file is not None else ()
    path = next((path for folder in (*folders, *above) if (path := folder / name).is_file()), None)
    if path is None:
        raise ConfigError(
            f"the DeepSpeed configuration {name!r} does not exist, seen from {Path.cwd()} or a folder above the "
            "launch file.",
            place=place,
            fix="write its absolute path in the launch file.",
        )
    return read_source_file(Path(name) if Path(name).is_file() else path)
