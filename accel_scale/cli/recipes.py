"""`accel-scale recipes`: list the recipes that come with the package, or copy one to modify it."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

DESCRIPTION = "List the recipes that come with the package, or copy one into a folder of yours to change it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``list``, ``path NAME``, or ``copy NAME [FOLDER]``."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "action", choices=("list", "copy", "path"), help="list: names and what they do; path: where one is"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="copy and path: which recipe")
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="copy: where to. Default: here")


def run(args: argparse.Namespace) -> int:
    """Print the list, or copy and say how to launch the copy."""
    from accel_scale.errors import ConfigError
    from accel_scale.shipped import recipe_script, shipped_recipes

    if args.action == "list":
        if args.name is not None:
            raise ConfigError("list takes no name.", place="command line", fix=f"use copy {args.name}.")
        recipes = shipped_recipes()
        width = max(map(len, recipes))
        print("\n".join(f"{name:<{width}}  {summary}" for name, summary in recipes.items()))
        return 0
    if args.name is None:
        raise ConfigError(
            f"{args.action} needs a name.", place="command line", fix=f"use one of {', '.join(shipped_recipes())}."
        )
    source = recipe_script(args.name)
    if args.action == "path":
        print(source)
        return 0
    target = Path(args.folder) / f"{args.name}.py"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as text, target.open("xb") as copy:
            shutil.copyfileobj(text, copy)
    except FileExistsError:
        place = target if target.exists() else target.parent
        raise ConfigError("exists already.", place=str(place), fix="name another folder.") from None
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}.", place=str(target), fix="name another folder."
        ) from None
    print(f"copied to {target}; run it with: accelerate launch {target}")
    return 0
