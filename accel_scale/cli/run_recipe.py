"""`accel-scale sft` and the other recipes that come with the package: run one under Accelerate's launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """Run the recipe that comes with the package, as accelerate launch would.

  accel-scale {name} --launch fsdp2 --num_processes 8 …

--launch takes a launch file or the name of one that comes with the package; without it Accelerate's default counts.
--num_processes is the launcher's. Everything else goes to the recipe: accel-scale {name} --recipe_help lists it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the launcher; the rest belongs to the recipe."""
    name = parser.prog.split()[-1]
    parser.description = DESCRIPTION.format(name=name)
    parser.set_defaults(recipe=name)
    parser.add_argument("--launch", metavar="FILE", help="a launch file, or a name such as fsdp2, zero3, cpu")
    parser.add_argument("--num_processes", type=int, metavar="N", help="processes of all nodes together")
    parser.add_argument("--recipe_help", action="store_true", help="list the recipe's own flags")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FLAGS", help="flags of the recipe")


def arrange(words: Sequence[str]) -> list[str]:
    """Move the launcher's flags to the front, wherever they are; the recipe's follow after ``--``."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--launch")
    own.add_argument("--num_processes")
    own.add_argument("--recipe_help", action="store_true")
    given, rest = own.parse_known_args(list(words))
    if rest[:1] in (["--help"], ["-h"]):
        return ["--help"]
    named = {"--launch": given.launch, "--num_processes": given.num_processes}
    first = [word for flag, value in named.items() if value is not None for word in (flag, value)]
    return [*first, *(["--recipe_help"] if given.recipe_help else []), "--", *rest]


def run(args: argparse.Namespace) -> int:
    """Replace this process with the launcher, whose exit status and signals become this command's."""
    from accel_scale.errors import ConfigError
    from accel_scale.launching.machine import refuse_native_windows
    from accel_scale.shipped import recipe_script

    refuse_native_windows()
    script = str(recipe_script(args.recipe))
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if args.num_processes is not None and args.num_processes < 1:
        raise ConfigError(f"{args.num_processes} processes cannot run.", place="--num_processes", fix="use 1 or more.")
    if args.recipe_help or args.recipe == "tune":  # tune launches by itself
        if args.launch or args.num_processes:
            raise ConfigError(
                "it launches the recipe itself.", place="--launch or --num_processes", fix=f"see {args.recipe} --help."
            )
        command = [sys.executable, script, *(["--help"] if args.recipe_help else []), *words]
    else:
        command = [sys.executable, "-m", "accelerate.commands.launch", *launcher_words(args), script, *words]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def launcher_words(args: argparse.Namespace) -> list[str]:
    """Flags of Accelerate's launcher for ``--launch`` and ``--num_processes``.

    Raises:
        ConfigError: for a launch file that does not exist.
    """
    from accel_scale.errors import ConfigError
    from accel_scale.shipped import launch_names, named_launch_file

    flags = []
    if args.launch is not None:
        path = named_launch_file(args.launch)
        if not path.is_file():
            known = ", ".join(launch_names())
            fix = f"name a file, or one of {known}."
            raise ConfigError(f"there is no launch file {args.launch!r}.", place="--launch", fix=fix)
        flags += ["--config_file", str(path), *_deepspeed_file(path)]
    if args.num_processes is not None:
        flags += ["--num_processes", str(args.num_processes)]
    return flags


def _deepspeed_file(path: Path) -> list[str]:
    """Flag for DeepSpeed's file, which shipped files name relative to the checkout, not to the working folder."""
    from accel_scale.launching.launch_file import read_source_file
    from accel_scale.shipped import LAUNCH_FILES, shipped_folder

    folder = shipped_folder(LAUNCH_FILES)
    named = (read_source_file(path).values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if path.parent != folder or named is None or Path(named).is_file():
        return []
    return ["--deepspeed_config_file", str(folder.parent / named)]
