"""Run a launch file and a recipe small on CPU processes, before paying for GPUs.

  accel-scale rehearse --config_file accelerate_configs/fsdp2.yaml recipes/sft.py \\
      --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name data/train.jsonl --method lora

Shrinks the model's configuration to a tiny one of the same architecture (no weights are needed), trains a few steps,
saves, resumes in a new launch, reloads with from_pretrained, compares, and prints what passed. Launches one node of
two processes, or two along each way that ranks are divided: four for hybrid sharding, eight for pipeline × tensor ×
data. Of recipes/pretrain.py, too. Exits with 1 if anything failed.

The flags of `accelerate launch` come before the recipe, the recipe's own (its --config_file too) after it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.cli.recipe_words import mark_recipe, work_folder

if TYPE_CHECKING:
    from accel_scale.flags.command_line import RecipeCommand
    from accel_scale.launching.launch_file import LaunchFile
    from accel_scale.rehearsing.plan import DataChoice, Rehearsal
    from accel_scale.rehearsing.rehearse import Check, Report
    from accel_scale.shrinking.shrink import ShrunkenModel

    Prepared = tuple[ShrunkenModel, DataChoice, Rehearsal, str]

_MARKS = {
    "passed": "[green]passed[/]",
    "failed": "[red]FAILED[/]",
    "not offered": "[yellow]not offered[/]",
    "not reached": "[dim]–[/]",
}
_NUM_DOCUMENTS = 2000  # of the embedded text; more than the steps of a rehearsal read
_VALUE_FLAGS = ("--config_file", "--timeout_seconds", "--keep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale rehearse`."""
    parser.add_argument("--config_file", required=True, help="the launch file that accelerate launch will get")
    parser.add_argument(
        "--timeout_seconds",
        type=float,
        default=600.0,
        help="time-out of a launch; DeepSpeed compiles for minutes at its first offload (default: 600)",
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep the tiny model, logs, checkpoints and results here")
    parser.add_argument("recipe", nargs="+", help="the recipe and its flags, as after accelerate launch")


def arrange(words: Sequence[str]) -> list[str]:
    """See `mark_recipe`."""
    return mark_recipe(words, _VALUE_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Rehearse and print the result; 1 if anything failed."""
    with work_folder(args.keep, "rehearsal-") as folder:
        return _rehearse(args, folder)


def _refuse_at_once(recipe: RecipeCommand) -> None:
    """What the recipe says to its flags alone, before a model is shrunk and processes are started.

    A script that is none of this project's recipes, which say what their flags are, is asked by launching it.
    """
    from accel_scale.flags.parsing import parse_flags
    from accel_scale.starting.early_checks import refuse_unreadable
    from accel_scale.tuning.recipe import load_recipe

    if "FLAG_CLASSES" not in recipe.script.read_text(encoding="utf-8", errors="replace"):
        return
    known = load_recipe(recipe.script)
    parsed = parse_flags(known.classes, recipe.words, program=known.program)
    refuse_unreadable(parsed)
    known.refuse(parsed)


def _rehearse(args: argparse.Namespace, work: Path) -> int:
    from accel_scale.flags.command_line import RecipeCommand
    from accel_scale.flags.paths import MODEL_FLAGS
    from accel_scale.launching.launch_file import read_launch_file
    from accel_scale.planning.models.catalogue import catalogue_config
    from accel_scale.quiet import quiet_imports
    from accel_scale.starting.early_checks import check_model

    launch = read_launch_file(args.config_file)
    recipe = RecipeCommand.parse(args.recipe[0], args.recipe[1:])
    for flag in MODEL_FLAGS[:2]:  # data that are elsewhere are replaced
        name = recipe.value(flag)
        if name and catalogue_config(str(name)) is None:
            check_model(str(name), place=recipe.place(flag))
    quiet_imports()
    _refuse_at_once(recipe)
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from accel_scale.rehearsing.rehearse import Check, run_rehearsal

    # The table is the output; tiny models load in milliseconds and need no bars.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # retries of a Hub that is out of reach
    warnings.simplefilter("ignore", FutureWarning)
    started = time.perf_counter()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    prepare = _prepare_pretraining if recipe.script.name == "pretrain.py" else _prepare
    with console.status("shrinking the model"):
        tiny, data, rehearsal, real_model = prepare(launch, recipe, work)
    details = (
        f"{tiny.architecture}, {tiny.num_layers[0]} → {tiny.num_layers[1]} layers, {tiny.num_parameters:,} parameters"
    )
    shrunk = Check("shrink", "passed", details, time.perf_counter() - started)
    with console.status("launching") as status:
        report = run_rehearsal(
            rehearsal, work, timeout_seconds=args.timeout_seconds, on_start=lambda name: status.update(name)
        )
    report.checks.insert(0, shrunk)
    notes = list(rehearsal.notes)
    if not tiny.own_tokenizer:
        notes.insert(0, f"tokenizer: the embedded one, that of {real_model} is not on this machine")
    if data.replaced:
        notes.insert(0, f"data: embedded rows in place of {data.replaced}")
    _print(console, report, title=f"rehearsal of {args.config_file}, {launch.parallel.label}", notes=notes)
    if not report.passed and args.keep is None:
        console.print("Logs and checkpoints are kept with --keep FOLDER.")
    return 0 if report.passed else 1


def _prepare(launch: LaunchFile, recipe: RecipeCommand, work: Path) -> Prepared:
    """Of a fine-tuning recipe: the tiny model, the data, what to launch, and the real model's name."""
    from accel_scale.data.default import default_model_path
    from accel_scale.rehearsing.plan import choose_data, plan_rehearsal

    real_model = str(recipe.value("model_name_or_path", default_model_path()))
    tiny = _shrink(real_model, recipe, work)
    data = choose_data(recipe, work, fallback=_embedded_rows(), has_chat_template=tiny.has_chat_template)
    return tiny, data, plan_rehearsal(launch, recipe, model_folder=tiny.folder, data=data, work=work), real_model


def _prepare_pretraining(launch: LaunchFile, recipe: RecipeCommand, work: Path) -> Prepared:
    """The same of the pretraining recipe, whose model may have a name, a configuration or only a size."""
    from accel_scale.data.default import default_model_path, default_pretraining_text
    from accel_scale.rehearsing.pretraining import choose_text, min_layers, plan_pretraining_rehearsal

    named = recipe.value("model_name_or_path") or recipe.value("model_config")
    size = recipe.value("num_params")
    real_model = str(named or (_config_of(str(size), recipe, work / "real") if size else default_model_path()))
    tiny = _shrink(real_model, recipe, work, min_layers=min_layers(launch, recipe))
    real_model = real_model if named or not size else f"a model of --num_params {size}"
    data = choose_text(
        recipe,
        fallback=lambda: default_pretraining_text(str(work), num_documents=_NUM_DOCUMENTS),
        own_tokenizer=tiny.own_tokenizer,
    )
    rehearsal = plan_pretraining_rehearsal(launch, recipe, model_folder=tiny.folder, data=data, work=work)
    return tiny, data, rehearsal, real_model


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


def _print(console: Any, report: Report, *, title: str, notes: Sequence[str]) -> None:
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
