"""Finds the recipe that a script declares as `RECIPE` at its top level, inside or outside the package."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.flags.library import FlagClass, known_table
from accel_scale.flags.parsing import ParsedFlags, build_parser, parse_flags
from accel_scale.planning.search.recipe_choices import PlannedRecipe
from accel_scale.recipe_specs.spec import RecipeSpec

_NAME = "RECIPE"
HOW_TO_DECLARE = "assign an accel_scale.RecipeSpec to RECIPE at its top level, with the dataclasses of its flags."


@dataclass(frozen=True)
class Recipe:
    """A script and its declaration.

    Attributes:
        path: The script.
        spec: Its `RECIPE`.
        parser: Parser of its flags.
    """

    path: Path
    spec: RecipeSpec
    parser: argparse.ArgumentParser

    @property
    def program(self) -> str:
        """The recipe's name in messages."""
        return self.spec.name_of(self.path)

    @property
    def classes(self) -> tuple[FlagClass, ...]:
        """The dataclasses that hold its flags."""
        return self.spec.flags

    @property
    def stem(self) -> str:
        """The script's name without its extension: ``sft``."""
        return self.path.stem

    @property
    def planned(self) -> PlannedRecipe:
        """The planner's description of the recipe, with the script's path and its flags."""
        names = frozenset(action.dest for action in self.parser._actions)
        return replace(self.spec.plan, script=str(self.path), flags=self.spec.plan.flags or names)

    def parse(self, words: Sequence[str]) -> ParsedFlags:
        """Parse the recipe's flags from a command line.

        Raises:
            ConfigError: for an unknown flag, a wrong type, or a bad choice.
        """
        return parse_flags(self.classes, words, program=self.program)

    def default(self, flag: str) -> Any:
        """The default of `flag`."""
        return plain(self.parser.get_default(flag))

    def has(self, flag: str) -> bool:
        """True if the recipe has `flag`."""
        return any(f"--{flag}" in action.option_strings for action in self.parser._actions)

    def require(self, flags: Iterable[str], purpose: str) -> None:
        """Refuse a recipe that lacks one of `flags`, which `purpose` needs to set.

        Raises:
            ConfigError: naming the missing flag.
        """
        for flag in flags:
            if not self.has(flag):
                raise ConfigError(f"has no --{flag}, which {purpose} sets.", place=str(self.path), fix="add the flag.")


def declares_recipe(path: Path) -> bool:
    """True if the script binds `RECIPE` at its top level, according to its source, which is not run.

    A script without `RECIPE` may do anything on import, so it is never imported.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError):
        return False
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == _NAME for target in targets):
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == _NAME for alias in node.names):
            return True
    return False


def find_recipe(path: str | Path) -> Recipe | None:
    """The recipe declared by the script at `path`; None if it declares none.

    Raises:
        ConfigError: if there is no such script, it cannot be imported, or its `RECIPE` is not a `RecipeSpec`.
    """
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"there is no recipe {str(path)!r}.", place="command line", fix="name a script first.")
    if not declares_recipe(path):
        return None
    spec = getattr(_imported(path), _NAME)
    if not isinstance(spec, RecipeSpec):
        raise ConfigError(f"{_NAME} is a {type(spec).__name__}.", place=str(path), fix="make it a RecipeSpec.")
    parser = build_parser(spec.flags, program=spec.name_of(path), table=known_table(spec.flags))
    return Recipe(path, spec, parser)


def load_recipe(path: str | Path) -> Recipe:
    """`find_recipe` for commands that require a recipe.

    Raises:
        ConfigError: as there, and for a script without a recipe, or a recipe without flags.
    """
    recipe = find_recipe(path)
    if recipe is None:
        raise ConfigError("does not say which flags it has.", place=str(path), fix=HOW_TO_DECLARE)
    if not recipe.classes:
        raise ConfigError(f"{_NAME} has no flags.", place=str(path), fix="give it flags=(YourArguments,).")
    return recipe


def _imported(path: Path) -> object:
    """Import the script as a module; it must not run anything on import."""
    found = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.parent.resolve()))  # as when a script is run
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"cannot be imported: {error!r}.", place=str(path), fix="mend the script.") from error
    finally:
        sys.path.pop(0)
    return module


def plain(value: Any) -> Any:
    """`value` as plain YAML and JSON types."""
    value = getattr(value, "value", value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
