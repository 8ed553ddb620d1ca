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
from typing import TYPE_CHECKING

from accel_scale.checks.case import Finding, Launch
from accel_scale.checks.run_settings import RunSettings
from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags
    from accel_scale.launching.machine import LocalMachine
    from accel_scale.recipe_specs.spec import RecipeSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale doctor`."""
    parser.add_argument("--config_file", help="the launch file that accelerate launch will get")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument(
        "recipe", nargs=argparse.REMAINDER, help="the recipe and its flags, as after accelerate launch"
    )


def arrange(words: Sequence[str]) -> list[str]:
    """Insert ``--`` before the recipe or its first flag, so that argparse leaves everything after it to the recipe."""
    index = 0
    while index < len(words) and words[index].partition("=")[0] in ("--config_file", "--json", "--help", "-h"):
        index += 2 if words[index] == "--config_file" else 1
    return [*words[:index], "--", *words[index:]] if index < len(words) else list(words)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; returns 1 if it has errors."""
    from accel_scale.checks.doctor import as_json, diagnose, print_diagnosis
    from accel_scale.launching.gpu_links import with_gpu_links
    from accel_scale.launching.machine import detect_machine

    more: list[Finding] = []
    launch = _launch(args.config_file, more)
    spec, parsed = _recipe_flags(args.recipe, more)
    settings = RunSettings() if parsed is None else RunSettings.from_flags(_values(spec, parsed), parsed.origins)
    machine = detect_machine([settings.output_dir, *launch.parallel.nvme_paths])
    machine = with_gpu_links(machine, launch.file_values.get("gpu_ids"))
    if parsed is not None:
        more += _refusals_of_the_recipe(spec, parsed, launch, machine)
    diagnosis = diagnose(settings, launch, machine, more=more)
    if args.json:
        print(as_json(diagnosis))
    else:
        print_diagnosis(diagnosis, sys.stdout)
    return int(diagnosis.has_errors)


def _launch(config_file: str | None, more: list[Finding]) -> Launch:
    """The launch file's settings; without a file, those of this process."""
    from accel_scale.launching.environment import current_launch
    from accel_scale.launching.launch_file import read_launch_file

    if config_file is not None:
        try:
            return read_launch_file(config_file)
        except ConfigError as error:
            more.append(_finding(error))
    return current_launch()


def _recipe_flags(words: Sequence[str], more: list[Finding]) -> tuple[RecipeSpec, ParsedFlags | None]:
    """The script's declaration and flags; sft.py's without a script. The flags are None if missing or wrong."""
    from accel_scale.recipe_specs.finding import HOW_TO_DECLARE, find_recipe
    from accel_scale.recipe_specs.trl import SFT
    from accel_scale.shipped import named_script

    flags = [word for position, word in enumerate(words) if position or word != "--"]
    spec, program = SFT, SFT.program
    try:
        if flags and not flags[0].startswith("-"):
            script = named_script(flags.pop(0))
            if not script.is_file():
                more.append(Finding("error", str(script), "there is no such recipe.", "check the path."))
            elif (recipe := find_recipe(script)) is None:
                problem = "does not say which flags it has, so only the launch file and the machine are checked."
                more.append(Finding("warning", str(script), problem, HOW_TO_DECLARE))
                return spec, None
            else:
                spec, program = recipe.spec, recipe.program
        parsed = read_recipe_flags(flags, spec, program=program) if flags or spec.divides_model else None
    except ConfigError as error:
        more.append(_finding(error))
        return spec, None
    return spec, parsed


def _values(spec: RecipeSpec, parsed: ParsedFlags) -> dict[str, object]:
    """The flags that were given; a recipe that divides its model among ranks is recognised by its ``--pp_size``."""
    return {"pp_size": 1, **parsed.explicit} if spec.divides_model else parsed.explicit


def read_recipe_flags(flags: Sequence[str], spec: RecipeSpec, *, program: str = "") -> ParsedFlags:
    """`flags` as the recipe of `spec` reads them.

    Raises:
        ConfigError: an unknown flag, a wrong type, a bad choice, or flags that contradict each other.
    """
    from accel_scale.flags.parsing import parse_flags
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    parsed = parse_flags(spec.flags, flags, program=program or spec.program)
    spec.refuse(parsed)
    return parsed


def _refusals_of_the_recipe(
    spec: RecipeSpec, parsed: ParsedFlags, launch: Launch, machine: LocalMachine
) -> list[Finding]:
    """What the recipe itself refuses when it resolves its settings; each step stops at its first refusal."""
    from accel_scale.optimization.optimizers import check_optimizer
    from accel_scale.settings.resolve import resolve
    from accel_scale.settings.resolved import LaunchFacts

    device = CPU if launch.parallel.use_cpu else machine.accelerator
    found: list[Finding] = []
    ranks = launch.num_processes or 1
    from accel_scale.starting.layout import layout_of, row_group_size

    with _collected(found):
        divided = spec.divides_model
        ranks = layout_of(parsed, launch).data_ranks if divided else ranks // row_group_size(parsed, launch)
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
            offload_optimizer=launch.parallel.offloads_optimizer,
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
