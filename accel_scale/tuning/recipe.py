"""The recipe's flags that are fixed during a search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.recipe_specs.finding import Recipe, plain
from accel_scale.secrets import is_secret

# Flags that users cannot set for a trial, with what to do instead.
_OWNED = {
    "output_dir": "every trial has a folder of its own under tune.py's --output_dir.",
    "config_file": "write its flags into the space, or pass it after `--`.",
    "print_config": "run the recipe itself with --print_config.",
}
_RESUMES = "trials begin at the beginning; tune.py continues a study by itself."


def refuse_owned(recipe: Recipe, flag: str, place: str) -> None:
    """Refuse a flag that the search sets itself."""
    if flag in _OWNED or flag == recipe.spec.resume_flag:
        raise ConfigError(f"{flag!r} cannot be set for a trial.", place=place, fix=_OWNED.get(flag, _RESUMES))


@dataclass(frozen=True)
class FixedFlags:
    """Flags that every trial gets in addition to the searched values.

    Attributes:
        values: Value of each flag, as in YAML.
        origins: Origin of each flag, ``--flag`` or ``file.yaml:12``.
        output_dir: Output folder in the recipe's file, if any; used for the final run, not for the trials.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    output_dir: str | None = None


def fixed_flags(
    recipe: Recipe, argv: Sequence[str], space: Mapping[str, tuple[Any, str]], searched: Mapping[str, str]
) -> FixedFlags:
    """Merge the fixed flags: those after ``--`` override the space's, which override a ``--config_file`` after ``--``.

    Args:
        space: Value and place of each flag that the space fixes.
        searched: Place of each flag that the space searches, which overrides the recipe's file.

    Raises:
        ConfigError: for an unknown flag, a bad value, a flag that is also searched, or a credential.
    """
    parsed = recipe.parse(argv)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    typed = {name for name, place in parsed.origins.items() if place == f"--{name}"}
    output_dir = parsed.explicit.get("output_dir") if "output_dir" not in typed else None
    for name in parsed.explicit.keys() - typed - searched.keys() - {"output_dir"}:
        refuse_owned(recipe, name, parsed.place(name))
        values[name], origins[name] = plain(parsed.explicit[name]), parsed.place(name)
    for name, (value, place) in space.items():
        values[name], origins[name] = value, place
    for name in typed:
        refuse_owned(recipe, name, f"--{name}")
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


def as_label(value: object) -> str | int | float | bool | None:
    """`value` as Optuna can store it as a choice: lists and mappings become JSON."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else json.dumps(value)
