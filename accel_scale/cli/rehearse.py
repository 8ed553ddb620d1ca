"""Run a launch file and a recipe at small scale on CPU processes, before paying for GPUs.

  accel-scale rehearse --config_file accelerate_configs/fsdp2.yaml recipes/sft.py \\
      --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name data/train.jsonl --method lora

Shrinks the model's configuration to a tiny one of the same architecture (no weights are needed), trains a few steps,
saves, resumes in a new launch, reloads with from_pretrained, compares, and prints what passed. Launches one node of
two processes, or two along each dimension of parallelism: four for hybrid sharding, eight for pipeline × tensor ×
data. A script of your own can be rehearsed too, if it takes the flags of transformers' Trainer or declares a `RECIPE`.
Exits with 1 if anything failed.

The flags of `accelerate launch` come before the recipe, the recipe's own (its --config_file too) after it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.rehearsing.recipe_words import mark_recipe, work_folder

if TYPE_CHECKING:
    from accel_scale.flags.command_line import RecipeCommand
    from accel_scale.launching.launch_file import LaunchFile
    from accel_scale.recipe_specs.finding import Recipe
    from accel_scale.recipe_specs.spec import RehearsalSpec
    from accel_scale.rehearsing.plan import Rehearsal
    from accel_scale.rehearsing.rehearse import Check, RehearsalReport
    from accel_scale.shrinking.shrink import ShrunkenModel

_MARKS = {
    "passed": "[green]passed[/]",
    "failed": "[red]FAILED[/]",
    "not offered": "[yellow]not offered[/]",
    "not reached": "[dim]–[/]",
}
_NUM_DOCUMENTS = 2000  # of the embedded text; more than a rehearsal reads
_VALUE_FLAGS = ("--config_file", "--timeout_seconds", "--keep", "--model_flag")
_MUST_ACCEPT = (
    "declares no RECIPE. It must then accept transformers' --output_dir, --max_steps, --save_steps, --logging_steps, "
    "--resume_from_checkpoint and the like, and write a Trainer's checkpoints; docs/rehearsal.md says how to declare "
    "other flags."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale rehearse`."""
    parser.add_argument("--config_file", required=True, help="the launch file that accelerate launch will get")
    parser.add_argument(
        "--timeout_seconds",
        type=float,
        default=600.0,
        help="time-out of a launch; DeepSpeed compiles for minutes at its first offload (default: 600)",
    )
    parser.add_argument(
        "--model_flag", metavar="FLAG", help="which flag of a script of your own names the model (model_name_or_path)"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep the tiny model, logs, checkpoints and results here")
    parser.add_argument("recipe", nargs="+", help="the recipe and its flags, as after accelerate launch")


def arrange(words: Sequence[str]) -> list[str]:
    """See `mark_recipe`."""
    return mark_recipe(words, _VALUE_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Rehearse and print the result; returns 1 if anything failed."""
    from accel_scale.launching.machine import refuse_native_windows

    refuse_native_windows()
    with work_folder(args.keep, "rehearsal-") as folder:
        return _rehearse(args, folder)


def _refuse_at_once(known: Recipe, recipe: RecipeCommand) -> None:
    """Refuse what the recipe refuses from its flags alone, before a model is shrunk and processes are started."""
    from accel_scale.starting.early_checks import refuse_unreadable

    parsed = known.parse(recipe.words)
    refuse_unreadable(parsed)
    known.spec.refuse(parsed)


def _rehearse(args: argparse.Namespace, work: Path) -> int:
    from accel_scale.flags.command_line import RecipeCommand
    from accel_scale.flags.paths import MODEL_FLAGS
    from accel_scale.launching.launch_file import read_launch_file
    from accel_scale.planning.models.catalogue import catalogue_config
    from accel_scale.quiet import quiet_imports
    from accel_scale.recipe_specs.finding import find_recipe
    from accel_scale.starting.early_checks import check_model

    launch = read_launch_file(args.config_file)
    recipe = RecipeCommand.parse(args.recipe[0], args.recipe[1:])
    for flag in MODEL_FLAGS[:2]:  # data that are not here are replaced
        name = recipe.value(flag)
        if name and catalogue_config(str(name)) is None:
            check_model(str(name), place=recipe.place(flag))
    quiet_imports()
    known = find_recipe(recipe.script)
    if known is not None:
        if args.model_flag is not None:
            raise ConfigError("the recipe declares it.", place="--model_flag", fix="remove it.")
        _refuse_at_once(known, recipe)
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from accel_scale.rehearsing.rehearse import run_rehearsal

    # The table is the output; tiny models load in milliseconds and need no bars.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # silences retries if the Hub is out of reach
    warnings.simplefilter("ignore", FutureWarning)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    with console.status("shrinking the model"):
        rehearsal, shrunk = _prepare(launch, recipe, known, args.model_flag, work)
    with console.status("launching") as status:
        report = run_rehearsal(
            rehearsal, work, timeout_seconds=args.timeout_seconds, on_start=lambda name: status.update(name)
        )
    report.checks.insert(0, shrunk)
    title = f"rehearsal of {args.config_file}, {launch.parallel.label}"
    _print(console, report, title=title, notes=rehearsal.notes)
    if known is None and not report.passed:
        console.print(f"{recipe.script} {_MUST_ACCEPT}", soft_wrap=True)
    if not report.passed and args.keep is None:
        console.print("Logs and checkpoints are kept with --keep FOLDER.")
    return 0 if report.passed else 1


def _prepare(
    launch: LaunchFile, recipe: RecipeCommand, known: Recipe | None, model_flag: str | None, work: Path
) -> tuple[Rehearsal, Check]:
    """The rehearsal to launch, and a check that reports how the model was shrunk."""
    from accel_scale.data.default import default_pretraining_text
    from accel_scale.recipe_specs.spec import RecipeSpec
    from accel_scale.rehearsing.plan import choose_data, has_trainer_flag, plan_rehearsal
    from accel_scale.rehearsing.pretraining import choose_text, min_layers, plan_pretraining_rehearsal
    from accel_scale.rehearsing.rehearse import Check

    started = time.perf_counter()
    spec = known.spec if known is not None else RecipeSpec()
    if model_flag is not None:
        spec = replace(spec, rehearsal=replace(spec.rehearsal, model_flag=model_flag.lstrip("-")))
    real_model, about = _real_model(recipe, known, spec.rehearsal, work)
    layers = {"min_layers": min_layers(launch, recipe)} if spec.divides_model else {}
    tiny = _shrink(real_model, recipe, work, **layers) if real_model is not None else None
    if spec.rehearsal.data == "text":
        data = choose_text(
            recipe,
            fallback=lambda: default_pretraining_text(str(work), num_documents=_NUM_DOCUMENTS),
            own_tokenizer=tiny is None or tiny.own_tokenizer,
        )
    else:
        template = tiny is not None and tiny.has_chat_template
        data = choose_data(recipe, work, fallback=_embedded_rows(), has_chat_template=template, spec=spec)
    if spec.divides_model and tiny is not None:
        rehearsal = plan_pretraining_rehearsal(
            launch, recipe, model_folder=tiny.folder, data=data, work=work, spec=spec
        )
    else:
        if known is not None:
            known.require(("output_dir", "max_steps"), "a rehearsal")
        has = known.has if known is not None else lambda flag: has_trainer_flag(recipe, spec, flag)
        folder = tiny.folder if tiny is not None else None
        rehearsal = plan_rehearsal(launch, recipe, model_folder=folder, data=data, work=work, spec=spec, has=has)
    if tiny is None:
        details = "no flag names a model, so the script's own is trained; --model_flag says which flag does"
        return rehearsal, Check("shrink", "not offered", details, time.perf_counter() - started)
    if not tiny.own_tokenizer:
        rehearsal.notes.insert(0, f"tokenizer: the embedded one, that of {about} is not on this machine")
    if data.replaced:
        rehearsal.notes.insert(0, f"data: embedded rows in place of {data.replaced}")
    layers_text = f"{tiny.num_layers[0]} → {tiny.num_layers[1]} layers"
    details = f"{tiny.architecture}, {layers_text}, {tiny.num_parameters:,} parameters"
    return rehearsal, Check("shrink", "passed", details, time.perf_counter() - started)


def _real_model(
    recipe: RecipeCommand, known: Recipe | None, spec: RehearsalSpec, work: Path
) -> tuple[str | None, str]:
    """The model to shrink (a name or folder, None if no flag names one) and what to call it."""
    from accel_scale.data.default import default_model_path

    flags = [flag for flag in (spec.model_flag, spec.config_flag) if flag is not None]
    named = next((str(value) for flag in flags if (value := recipe.value(flag))), None)
    size = recipe.value(spec.size_flag) if spec.size_flag is not None else None
    if named is None and size:
        return str(_config_of(str(size), recipe, work / "real")), f"a model of --{spec.size_flag} {size}"
    if named is None and known is not None and spec.model_flag is not None:
        known.require([spec.model_flag], "a rehearsal")
        named = str(known.default(spec.model_flag) or default_model_path())
    return named, str(named)


def _shrink(real_model: str, recipe: RecipeCommand, work: Path, **options: Any) -> ShrunkenModel:
    from accel_scale.data.default import default_model_path
    from accel_scale.shrinking.shrink import write_shrunken_model

    return write_shrunken_model(
        real_model,
        work / "model",
        revision=recipe.value("model_revision"),
        trust_remote_code=str(recipe.value("trust_remote_code", "false")).lower() == "true",
        fallback_tokenizer=default_model_path(),
        **options,
    )


def _config_of(size: str, recipe: RecipeCommand, folder: Path) -> Path:
    """The configuration that the recipe would choose for ``--num_params``."""
    from transformers import AutoTokenizer

    from accel_scale.data.default import default_model_path
    from accel_scale.modeling.scratch import config_of_size, parse_count

    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    vocab_size = int(recipe.value("vocab_size") or len(tokenizer))
    length = int(recipe.value("max_length") or 1024)
    count = parse_count(size, place="--num_params")
    config_of_size(count, vocab_size=vocab_size, max_length=length, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def _embedded_rows() -> Iterator[dict[str, Any]]:
    import json

    from accel_scale.data.default import default_data_paths

    with open(default_data_paths()[0], encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _print(console: Any, report: RehearsalReport, *, title: str, notes: Sequence[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("check", style="cyan", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("seen", overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    for check in report.checks:
        seconds = f"{check.seconds:.1f}" if check.outcome != "not reached" else ""
        table.add_row(check.name, _MARKS[check.outcome], escape(check.details), seconds)
    table.add_section()
    table.add_row("total", _MARKS["passed" if report.passed else "failed"], "", f"{_total_seconds(report.checks):.1f}")
    console.print(table)
    for note in notes:
        console.print(f"[dim]{escape(note)}[/]")


def _total_seconds(checks: Sequence[Check]) -> float:
    return sum(check.seconds for check in checks)
