"""Recipes and launch files shipped with the package: from the checkout it runs in, else from the wheel."""

from __future__ import annotations

import ast
from pathlib import Path

from accel_scale.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
RECIPES, LAUNCH_FILES = "recipes", "accelerate_configs"


def shipped_folder(name: str) -> Path:
    """Folder of `RECIPES` or `LAUNCH_FILES`; a wheel has both below ``accel_scale/assets``, see ``setup.py``."""
    checkout = _PACKAGE.parent / name
    return checkout if (_PACKAGE.parent / "pyproject.toml").is_file() else _PACKAGE / "assets" / name


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes, including the tuner, sorted."""
    return tuple(sorted(path.stem for path in shipped_folder(RECIPES).glob("*.py")))


def shipped_recipes() -> dict[str, str]:
    """Name → first line of its description."""
    texts = {name: (shipped_folder(RECIPES) / f"{name}.py").read_bytes() for name in recipe_names()}
    return {name: (ast.get_docstring(ast.parse(text)) or "").splitlines()[0] for name, text in texts.items()}


def recipe_script(name: str) -> Path:
    """Path of the recipe called `name`, such as ``sft``.

    Raises:
        ConfigError: if there is no such recipe.
    """
    path = shipped_folder(RECIPES) / f"{name}.py"
    if Path(name).name != name or not path.is_file():
        known = ", ".join(recipe_names())
        raise ConfigError(f"there is no recipe {name!r}.", place="command line", fix=f"use {known}.")
    return path


def named_script(text: str) -> Path:
    """`text` as a path, or a shipped recipe's path if it is like ``sft`` or ``recipes/sft.py`` and not a file here."""
    path = Path(text)
    is_shipped = text in (path.stem, f"{RECIPES}/{path.stem}.py") and path.stem in recipe_names()
    return recipe_script(path.stem) if is_shipped and not path.is_file() else path


def named_launch_file(text: str | Path) -> Path:
    """`text` as a path, or a shipped launch file's path if it names one, such as ``fsdp2``, and no file."""
    path = shipped_folder(LAUNCH_FILES) / f"{text}.yaml"
    return path if not Path(text).exists() and str(text) in launch_names() else Path(text)


def launch_names() -> tuple[str, ...]:
    """Names of the launch files that come with the package."""
    return tuple(sorted(path.stem for path in shipped_folder(LAUNCH_FILES).glob("*.yaml")))
