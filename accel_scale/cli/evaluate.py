"""`accel-scale eval`: tasks on a saved model, whole or adapter."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_scale.inference.evaluation import Row
    from accel_scale.inference.saved import SavedModel

DESCRIPTION = """Evaluate a saved model, whole or adapter, and write eval.json into its folder.

  accel-scale eval outputs/sft --tasks embedded
  accel-scale eval outputs/sft --tasks questions.jsonl hellaswag --limit 200
  accel-scale eval outputs/sft --tasks gsm8k --launch ddp --num_processes 4

A file is scored by exact match: one JSON object a line, with prompt and completion, or messages. `embedded` are the
held-out questions that recipes/sft.py reports on. Every other name is a task of lm-evaluation-harness
(pip install 'accel-scale[eval]'). Under a launch each process holds the whole model and takes a share of the rows."""
PROGRAM = "accel-scale eval"
RESULT_NAME = "eval.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; light, so that `--help` stays fast."""
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="FOLDER", help="Folder (or Hub id) of a model or an adapter.")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="embedded, files, names of lm-eval")
    parser.add_argument("--base_model", help="Folder or Hub id of an adapter's base. Default: the one it names.")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="Rows answered together. Default: 32.")
    parser.add_argument("--max_new_tokens", type=int, default=32, metavar="N", help="Longest answer. Default: 32.")
    parser.add_argument("--limit", type=int, metavar="N", help="Only the first rows of each task.")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="lm-eval: examples in the prompt.")
    parser.add_argument("--apply_chat_template", action="store_true", help="lm-eval: ask by the chat template.")
    parser.add_argument("--include_path", metavar="DIR", help="lm-eval: a folder with tasks of your own.")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"Where results go. Default: FOLDER/{RESULT_NAME}; of a Hub id, {RESULT_NAME} here.",
    )
    parser.add_argument("--launch", metavar="FILE", help="a launch file, or a name such as ddp, cpu")
    parser.add_argument("--num_processes", type=int, metavar="N", help="processes of all nodes together")


def run(args: argparse.Namespace) -> int:
    """Check, launch if asked to, evaluate, print a table and write the file."""
    from accel_scale.errors import ConfigError
    from accel_scale.inference.evaluation import EMBEDDED, check_harness, is_file_task, read_questions
    from accel_scale.inference.saved import find_saved

    for flag in ("batch_size", "max_new_tokens", "limit", "num_processes"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ConfigError(f"{getattr(args, flag)} is too small.", place=f"--{flag}", fix="use 1 or more.")
    files = {task: read_questions(Path(task)) for task in args.tasks if is_file_task(task)}
    named = [task for task in args.tasks if task not in files and task != EMBEDDED]
    check_harness(named)
    saved = find_saved(args.folder, base_model=args.base_model)
    own = Path(args.folder).expanduser()
    target = Path(args.output) if args.output else (own if own.is_dir() else Path()) / RESULT_NAME
    _check_target(target)
    if args.launch or args.num_processes:
        _relaunch(args)
    return _evaluate(args, saved, files, named, target)


def _check_target(target: Path) -> None:
    from accel_scale.errors import ConfigError

    if target.is_dir() or not target.absolute().parent.is_dir():
        what = "is a folder." if target.is_dir() else "its folder does not exist."
        raise ConfigError(what, place=str(target), fix="name a file for --output.")
    if not target.exists():
        return
    try:
        is_ours = json.loads(target.read_text(encoding="utf-8")).get("program") == PROGRAM
    except (OSError, ValueError, AttributeError):
        is_ours = False
    if not is_ours:
        raise ConfigError("exists already, and is none of this command's.", place=str(target), fix="pass --output.")


def _relaunch(args: argparse.Namespace) -> None:
    """Replace this process with Accelerate's launcher of the same command."""
    from accel_scale.cli.run_recipe import launcher_words

    own = [args.folder, "--tasks", *args.tasks]
    for flag in ("base_model", "batch_size", "max_new_tokens", "limit", "num_fewshot", "include_path", "output"):
        if getattr(args, flag) is not None:
            own += [f"--{flag}", str(getattr(args, flag))]
    own += ["--apply_chat_template"] * args.apply_chat_template
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *launcher_words(args)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "accel_scale.cli.main", "eval", *own])


def _evaluate(
    args: argparse.Namespace, saved: SavedModel, files: dict[str, list[Row]], named: list[str], target: Path
) -> int:
    from accel_scale.errors import ConfigError
    from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
    from accel_scale.quiet import quiet_imports

    if os.environ.get("ACCELERATE_USE_FSDP") == "true" or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise ConfigError(
            "each process holds the whole model here.", place="--launch", fix="use ddp, or one process for all GPUs."
        )
    quiet_imports()  # before libraries that would print at import
    enable_rehearsal_if_needed()
    from accelerate import Accelerator

    from accel_scale.inference.evaluation import EMBEDDED, embedded_questions, match_rows, run_harness
    from accel_scale.inference.saved import load_saved
    from accel_scale.reporting.console import set_up_console
    from accel_scale.reporting.summary import write_summary
    from accel_scale.reporting.tables import print_table

    accelerator = Accelerator()
    set_up_console(is_main=accelerator.is_main_process)
    several = accelerator.num_processes > 1
    results: dict[str, dict[str, object]] = {}
    loaded = None
    if len(named) < len(args.tasks) or not several:
        loaded = load_saved(saved, device=accelerator.device if several else None)
    for task in args.tasks:
        if task in named:
            continue
        assert loaded is not None
        rows = embedded_questions() if task == EMBEDDED else files[task]
        results[Path(task).name if task != EMBEDDED else task] = match_rows(
            *loaded,
            rows[: args.limit],
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            reduce=lambda counts: accelerator.reduce(counts, "sum"),
        )
    if named:
        figures = run_harness(
            saved,
            None if several else loaded,
            named,
            batch_size=args.batch_size,
            limit=args.limit,
            include_path=args.include_path,
            num_fewshot=args.num_fewshot,
            chat=args.apply_chat_template,
        )
        results |= {task: dict(scores) for task, scores in figures.items()}
    if accelerator.is_main_process:
        print_table("eval", {task: _shown(scores) for task, scores in results.items()})
        content = {"program": PROGRAM, "model": saved.folder.name, "results": results, "limit": args.limit}
        print(f"written to {write_summary(target.absolute().parent, content, name=target.name)}")
    accelerator.end_training()
    return 0


def _shown(scores: dict[str, object]) -> str:
    if "num_correct" in scores:
        tasks = scores["tasks"]
        each = ", ".join(f"{name} {value:.1%}" for name, value in tasks.items()) if isinstance(tasks, dict) else ""
        return f"{scores['exact_match']:.1%} of {scores['num_questions']} questions" + f" ({each})" * ("," in each)
    numbers = {name: value for name, value in scores.items() if "," in name and "stderr" not in name}
    return ", ".join(f"{name.partition(',')[0]} {value:.4g}" for name, value in numbers.items())
