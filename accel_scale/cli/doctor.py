"""Versions, devices, and every contradiction between launch file, recipe flags and machine, each with its fix.

  accel-scale doctor
  accel-scale doctor --config_file accelerate_configs/fsdp2.yaml recipes/sft.py --method qlora --optim sgd

The flags of `accelerate launch` come before the recipe, the recipe's own (its --config_file too) after it.
Exits with 1 if anything would not work.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.checks.case import Finding, Launch
from accel_scale.checks.run_settings import RunSettings
from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags
    from accel_scale.launching.machine import Machine


# Recipes whose ranks can share the model.
_SHARING = ("pretrain.py",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale doctor`."""
    parser.add_argument("--config_file", help="the launch file that accelerate launch will get")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument(
        "recipe", nargs=argparse.REMAINDER, help="the recipe and its flags, as after accelerate launch"
    )


def arrange(words: Sequence[str]) -> list[str]:
    """A ``--`` before the recipe or its first flag, so that argparse leaves all that follows to the recipe."""
    index = 0
    while index < len(words) and words[index].partition("=")[0] in ("--config_file", "--json", "--help", "-h"):
        index += 2 if words[index] == "--config_file" else 1
    return [*words[:index], "--", *words[index:]] if index < len(words) else list(words)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 1 if it has errors."""
    from accel_scale.checks.doctor import as_json, diagnose, print_diagnosis
    from accel_scale.launching.machine import detect_machine

    more: list[Finding] = []
    launch = _launch(args.config_file, more)
    parsed = _recipe_flags(args.recipe, more)
    settings = RunSettings() if parsed is None else RunSettings.from_flags(_values(parsed), parsed.origins)
    machine = detect_machine([settings.output_dir, *launch.parallel.nvme_paths])
    if parsed is not None:
        more += _refusals_of_the_recipe(parsed, launch, machine)
    diagnosis = diagnose(settings, launch, machine, more=more)
    if args.json:
        print(as_json(diagnosis))
    else:
        print_diagnosis(diagnosis, sys.stdout)
    return int(diagnosis.has_errors)


def _launch(config_file: str | None, more: list[Finding]) -> Launch:
    """The launch file's settings; this process's own without one."""
    from accel_scale.launching.environment import current_launch
    from accel_scale.launching.launch_file import read_launch_file

    if config_file is not None:
        try:
            return read_launch_file(config_file)
        except ConfigError as error:
            more.append(_finding(error))
    return current_launch()


def _recipe_flags(words: Sequence[str], more: list[Finding]) -> ParsedFlags | None:
    """The recipe's flags, read by its own parser; None without any, or where it cannot read them."""
    flags = [word for position, word in enumerate(words) if position or word != "--"]
    recipe = Path("sft.py")
    if flags and not flags[0].startswith("-"):
        recipe = Path(flags.pop(0))
        if not recipe.is_file():
            more.append(Finding("error", str(recipe), "there is no such recipe.", "check the path."))
    if not flags and recipe.name not in _SHARING:
        return None
    try:
        return read_recipe_flags(flags, program=recipe.name)
    except ConfigError as error:
        more.append(_finding(error))
        return None


def _values(parsed: ParsedFlags) -> dict[str, object]:
    """The flags that were given; a recipe that shares its model between ranks is known by its ``--pp_size``."""
    return {"pp_size": 1, **parsed.explicit} if parsed.program in _SHARING else parsed.explicit


def read_recipe_flags(flags: Sequence[str], *, program: str = "sft.py") -> ParsedFlags:
    """`flags` as recipes/pretrain.py reads them, or, for any other `program`, recipes/sft.py.

    Raises:
        ConfigError: an unknown flag, a wrong type, a bad choice, or flags that contradict each other.
    """
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    if program == "pretrain.py":
        return _read_pretraining_flags(flags)
    from accel_scale.flags.common import ScaleArguments
    from accel_scale.flags.guard import TrainerGuardArguments
    from accel_scale.flags.parallel import SequenceArguments
    from accel_scale.flags.parsing import parse_flags
    from accel_scale.flags.sft import LIBRARY_CLASSES

    own = (ScaleArguments, TrainerGuardArguments, SequenceArguments)
    return parse_flags((*LIBRARY_CLASSES, *own), flags, program="sft.py")


def _read_pretraining_flags(flags: Sequence[str]) -> ParsedFlags:
    from accel_scale.flags.guard import GuardArguments
    from accel_scale.flags.parallel import ParallelArguments
    from accel_scale.flags.parsing import parse_flags
    from accel_scale.flags.pretraining import (
        PretrainArguments,
        PretrainDataArguments,
        PretrainModelArguments,
    )
    from accel_scale.training.pretrain.resolve import refuse_contradictions

    classes = (
        PretrainModelArguments,
        PretrainDataArguments,
        PretrainArguments,
        ParallelArguments,
        GuardArguments,
    )
    parsed = parse_flags(classes, flags, program="pretrain.py")
    refuse_contradictions(parsed)
    return parsed


def _refusals_of_the_recipe(parsed: ParsedFlags, launch: Launch, machine: Machine) -> list[Finding]:
    """What the recipe itself refuses while it resolves its settings; each step stops at its first."""
    from accel_scale.optimization.optimizers import check_optimizer
    from accel_scale.settings.resolve import LaunchFacts, resolve

    device = CPU if launch.parallel.use_cpu else machine.accelerator
    found: list[Finding] = []
    ranks = launch.num_processes or 1
    from accel_scale.starting.layout import layout_of, row_group_size

    with _collected(found):
        shares_model = parsed.program in _SHARING
        ranks = layout_of(parsed, launch).data_ranks if shares_model else ranks // row_group_size(parsed, launch)
    if found:
        return found
    facts = LaunchFacts(
        world_size=ranks,
        strategy=launch.parallel.name,
        mixed_precision=launch.mixed_precision,
        mixed_precision_place=launch.place("mixed_precision"),
        device=device,
    )
    with _collected(found):
        resolve(parsed, facts)
    with _collected(found):
        check_optimizer(
            parsed.explicit.get("optim", RunSettings.optim),
            device_type=device.type,
            strategy=facts.strategy,
            offload_optimizer=launch.parallel.offload_optimizer != "none",
            optim_args=parsed.explicit.get("optim_args"),
            place=parsed.place("optim"),
        )
    return found


@contextlib.contextmanager
def _collected(found: list[Finding]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        found.append(_finding(error))


def _finding(error: ConfigError) -> Finding:
    return Finding(
        "error", error.place or "command line", error.problem, error.fix or "see accel-scale doctor --help."
    )
