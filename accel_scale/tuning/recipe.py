"""A recipe in a search: which flags it has, and which of them are fixed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.flags.library import FlagClass, known_table
from accel_scale.flags.parsing import ParsedFlags, build_parser, parse_flags
from accel_scale.secrets import is_secret

# Flags that a trial cannot leave to the user, with what to do instead.
_OWNED = {
    "output_dir": "every trial has a folder of its own under tune.py's --output_dir.",
    "config_file": "write its flags into the space, or pass it after `--`.",
    "print_config": "run the recipe itself with --print_config.",
    "resume_from_checkpoint": "trials begin at the beginning; tune.py continues a study by itself.",
}


@dataclass(frozen=True)
class Recipe:
    """A script whose flags can be searched.

    Attributes:
        path: The script.
        program: Its name in messages.
        classes: The dataclasses that hold its flags.
        parser: Its own parser.
        refuse: What it says to flags that cannot work together, its ``refuse_contradictions``.
    """

    path: Path
    program: str
    classes: tuple[FlagClass, ...]
    parser: argparse.ArgumentParser
    refuse: Callable[[ParsedFlags], None] = lambda parsed: None

    @property
    def stem(self) -> str:
        """The script's name without its ending: ``sft``."""
        return self.path.stem

    def default(self, flag: str) -> Any:
        """What `flag` is where nobody sets it."""
        return plain(self.parser.get_default(flag))

    def has(self, flag: str) -> bool:
        """Whether the recipe has `flag`."""
        return any(f"--{flag}" in action.option_strings for action in self.parser._actions)


def load_recipe(path: str | Path) -> Recipe:
    """Import the script at `path`, which must not run anything at import, and ask it for its flags.

    Raises:
        ConfigError: there is no such script, it cannot be imported, or it does not say what its flags are.
    """
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"there is no recipe {str(path)!r}.", place="command line", fix="name a script first.")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script that is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"cannot be imported: {error!r}.", place=str(path), fix="fix the script.") from error
    finally:
        sys.path.pop(0)
    classes = getattr(module, "FLAG_CLASSES", None)
    if not classes:
        raise ConfigError(
            "does not say which flags it has.",
            place=str(path),
            fix="define FLAG_CLASSES, the dataclasses it gives to accel_scale.flags.parsing.parse_flags.",
        )
    program = getattr(module, "PROGRAM", path.name)
    refuse = getattr(module, "refuse_contradictions", lambda parsed: None)
    return Recipe(path, program, tuple(classes), build_parser(classes, program=program, table=known_table()), refuse)


def refuse_owned(flag: str, place: str) -> None:
    """Refuse a flag that belongs to the search itself."""
    if flag in _OWNED:
        raise ConfigError(f"{flag!r} cannot be set for a trial.", place=place, fix=_OWNED[flag])


@dataclass(frozen=True)
class FixedFlags:
    """What every trial is given beside the searched values.

    Attributes:
        values: flag → value as YAML has it.
        origins: flag → ``--flag`` or ``file.yaml:12``.
        output_dir: Of the recipe's file, if it names one: for the final run, not for the trials.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    output_dir: str | None = None


def fixed_flags(
    recipe: Recipe, argv: Sequence[str], space: Mapping[str, tuple[Any, str]], searched: Mapping[str, str]
) -> FixedFlags:
    """The flags after ``--`` over the space's fixed ones over those of a ``--config_file`` after ``--``.

    Args:
        space: flag → value and place, as fixed in the space.
        searched: flag → where the space says that it is searched; there the recipe's file gives way.

    Raises:
        ConfigError: a flag the recipe does not have, a bad value, a flag that is searched too, a credential.
    """
    parsed = parse_flags(recipe.classes, argv, program=recipe.program)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    typed = {name for name, place in parsed.origins.items() if place == f"--{name}"}
    output_dir = parsed.explicit.get("output_dir") if "output_dir" not in typed else None
    for name in parsed.explicit.keys() - typed - searched.keys() - {"output_dir"}:
        refuse_owned(name, parsed.place(name))
        values[name], origins[name] = plain(parsed.explicit[name]), parsed.place(name)
    for name, (value, place) in space.items():
        values[name], origins[name] = value, place
    for name in typed:
        refuse_owned(name, f"--{name}")
        if name in searched:
            raise ConfigError(
                f"--{name} is fixed here and searched in the space.",
                place="command line, after --",
                fix=f"leave it out here, or remove {searched[name]}.",
            )
        values[name], origins[name] = plain(parsed.explicit[name]), f"--{name}"
    for name in sorted(filter(is_secret, values)):
        raise ConfigError(
            f"{name} would be written to a file for every trial.",
            place=origins[name],
            fix="give credentials by the environment (HF_TOKEN) or `hf auth login`.",
        )
    if values.get("push_to_hub"):
        raise ConfigError(
            "every trial would be uploaded.", place=origins["push_to_hub"], fix="push the final run; here: false."
        )
    order = {name: index for index, name in enumerate(action.dest for action in recipe.parser._actions)}
    ordered = {name: values[name] for name in sorted(values, key=lambda name: order[name])}
    return FixedFlags(ordered, origins, output_dir)


def plain(value: Any) -> Any:
    """`value` as YAML and JSON have it."""
    value = getattr(value, "value", value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def as_label(value: Any) -> str | int | float | bool | None:
    """`value` as Optuna can store it among choices: lists and mappings become JSON."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else json.dumps(value)
