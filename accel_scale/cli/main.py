"""The `accel-scale` command: find the subcommand and import nothing else."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from accel_scale.ending.user_errors import user_errors
from accel_scale.errors import ConfigError
from accel_scale.shipped import recipe_names, shipped_recipes


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors, like all others."""

    def error(self, message: str) -> NoReturn:
        problem = message[:1].upper() + message[1:].rstrip(".")
        raise ConfigError(f"{problem}.", place="command line", fix=f"see {self.prog} --help.")


class Command(NamedTuple):
    """A subcommand's module and its help line; if that is empty, the line of the recipe of this name.

    The module has ``add_arguments(parser) -> None`` and ``run(args) -> int``, and may have ``arrange(words) -> words``
    to put its command line into an order that argparse can read.
    """

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    **{name: Command("accel_scale.cli.run_recipe", "") for name in recipe_names()},
    "recipes": Command("accel_scale.cli.recipes", "list the recipes that come with the package, or copy one"),
    "import": Command("accel_scale.cli.import_config", "read a configuration of axolotl, LLaMA-Factory or TRL"),
    "plan": Command("accel_scale.cli.plan", "predict memory, speed and the best strategy before anything is loaded"),
    "doctor": Command("accel_scale.cli.doctor", "list versions, devices and contradictions before a launch"),
    "rehearse": Command("accel_scale.cli.rehearse", "run a launch file on CPU processes with a shrunken model"),
    "report": Command("accel_scale.report_page.command", "write a run's report.html again, or compare several runs"),
    "board": Command("accel_scale.board.command", "plan, check and watch runs on a local web page"),
    "merge": Command("accel_scale.cli.merge", "merge LoRA or QLoRA adapters into their base"),
    "chat": Command("accel_scale.cli.chat", "talk to a saved model in a terminal"),
    "eval": Command("accel_scale.cli.evaluate", "evaluate a saved model: exact match, lm-evaluation-harness"),
    "prepare": Command("accel_scale.cli.prepare", "tokenise pretraining data once, into memory-mapped shards"),
    "launch-script": Command(
        "accel_scale.cli.launch_script", "write job scripts for several nodes: Slurm, Kubernetes, SSH"
    ),
    "comm": Command("accel_scale.cli.comm", "predict or measure the cost of collectives; tune DDP's bucket size"),
    "scaling-test": Command(
        "accel_scale.cli.scaling_test", "run a recipe on 1, 2, … ranks and compare with linear scaling"
    ),
    "scaling": Command("accel_scale.cli.scaling", "scaling laws: parameters, tokens, compute, loss, time and price"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status, 2 for a setting that cannot be honoured."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _top_parser()
    if not argv or argv[0] not in COMMANDS:
        # --help and --version exit here, anything else is an error that lists the subcommands.
        parser.parse_args(argv or ["--help"])
    name = argv[0]
    # Only the chosen subcommand's module is imported: others may import torch.
    module = importlib.import_module(COMMANDS[name].module)
    own = _Parser(
        prog=f"accel-scale {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(own)
    with user_errors(own.prog):
        args = own.parse_args(getattr(module, "arrange", list)(argv[1:]))
        return int(module.run(args) or 0)
    raise AssertionError("user_errors exits")


def _top_parser() -> argparse.ArgumentParser:
    from accel_scale.version import __version__

    width, recipes = max(map(len, COMMANDS)), shipped_recipes()
    lines = [f"  {name:<{width}}  {command.summary or recipes[name]}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="accel-scale",
        usage="accel-scale COMMAND [--help] …",
        description="Plan, rehearse, run and trust language model training on Hugging Face Accelerate.",
        epilog="commands:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"accel-scale {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="one of the commands below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
