"""Will it fit, how fast is it, which strategy: predicts every combination you leave open, before anything is loaded.

  accel-scale plan meta-llama/Llama-3.1-8B --gpu "RTX 4090" --method auto
  accel-scale plan meta-llama/Llama-3.1-70B --gpu H100 --num_gpus 8 --max_length 4096 --explain
  accel-scale plan Qwen/Qwen3-8B --gpu 24GiB --method qlora --write plans/qwen3-8b
  accel-scale plan meta-llama/Llama-3.1-70B --gpu H100 --num_gpus 64 --recipe pretrain --tp_size 4 --pp_size 4

MODEL is a name of the catalogue, a folder, a config.json or a name on the hub. Exits with 1 if nothing fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.cli import plan_questions
from accel_scale.cycles import cycles_kept
from accel_scale.planning.search.wish import ANSWER, FLAGS, LISTS, MODEL, TRAINING, PlanFlag, Wish
from accel_scale.tracing import helper

if TYPE_CHECKING:
    from accel_scale.planning.search.recipe_choices import PlannedRecipe
    from accel_scale.planning.search.search import Plan, Request
    from accel_scale.planning.search.writing import WrittenPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale plan`; those shared with the recipe have the same names."""
    parser.add_argument("model", metavar="MODEL", help=MODEL.help)
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(flag.group for flag in FLAGS)}
    for flag in FLAGS:
        _add(groups[flag.group], flag)
    training, answer = groups[TRAINING], groups[ANSWER]
    training.add_argument(
        "--dataset_name", metavar="DATA", help="data set; the row lengths of local files are measured"
    )
    training.add_argument("--columns", nargs="+", metavar="ROLE=COLUMN", default=[], help="as in the recipe")
    answer.add_argument("--top", metavar="N", default="5", help="rows of the table (default: %(default)s)")
    answer.add_argument(
        "--explain", action="store_true", help="print the memory terms of the best setting, phase by phase"
    )
    answer.add_argument("--verify", action="store_true", help="run one step of the best setting and compare")
    answer.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    answer.add_argument("--write", metavar="DIR", help="write launch file and recipe flags of the best setting")
    plan_questions.add_arguments(parser)


def _add(group: argparse._ArgumentGroup, flag: PlanFlag) -> None:
    name, default = f"--{flag.name}", flag.default
    if flag.is_switch or flag.off:
        start = "true" if flag.off else None
        group.add_argument(name, nargs="?", const="true", default=start, help=flag.help)
        if flag.off:
            group.add_argument(f"--no_{flag.name}", action="store_true", help=flag.off)
    elif default is False:
        group.add_argument(name, action="store_true", help=flag.help)
    elif default == ():
        group.add_argument(name, action="append", default=[], help=flag.help)
    else:
        several = "+" if flag.name in LISTS else None
        group.add_argument(name, nargs=several, metavar=flag.metavar, default=default, help=flag.help)


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns 1 if nothing fits."""
    from accel_scale.planning.traced.fits import end_progress

    # Hundreds of thousands of sizes are freed by reference counting: collecting cycles would take a tenth of the time.
    with cycles_kept(), helper.allowed():
        try:
            return _run(args)
        finally:
            end_progress()


def _run(args: argparse.Namespace) -> int:
    from accel_scale.planning.search.request_words import whole
    from accel_scale.planning.search.requests import flag_places
    from accel_scale.planning.search.search import search
    from accel_scale.reporting import plan_json, plan_tables

    top = whole(args.top, "--top")
    budget = plan_tables.Budgeted.of_flags(args.tokens, args.price_per_gpu_hour)
    plan_questions.check(args)
    wish = _wish(args)
    with flag_places():
        status = plan_questions.answer(args, wish, budget.tokens)
    if status is not None:
        return status
    request, notes = _request(args, wish)
    with flag_places():
        is_extreme = args.longest or args.largest_batch
        plan = plan_questions.extreme(args, request, notes) if is_extreme else search(request)
        written = _write(args, plan, budget.tokens) if args.write and plan.best else None
        if args.json:
            print(json.dumps(plan_json.as_dict(plan, budget, notes, written), indent=2))
        else:
            plan_tables.print_plan(plan, budget, notes, top=top, explain=args.explain)
            plan_tables.print_written(written)
        if args.verify and plan.best:
            _verify(args, plan)
    return 0 if plan.best else 1


def _wish(args: argparse.Namespace) -> Wish:
    """The flags as typed, in the form that the planner takes."""
    from accel_scale.planning.models.catalogue import is_on_hub
    from accel_scale.planning.search.request_words import one_of

    if is_on_hub(args.model):
        from accel_scale.launching.hub_reach import give_up_if_unreachable

        give_up_if_unreachable()
    values = {f.name: getattr(args, f.name) for f in fields(Wish)}
    lists = {name: tuple(values[name]) for name in LISTS}
    packing = one_of(args.packing.lower(), ("true", "false"), "--packing") == "true" and not args.no_packing
    # Until its micro-batch is known, a step has as many rows as it takes.
    batch = {"global_batch_size": str(2**20)} if args.largest_batch else {}
    return Wish(**{**values, **lists, **batch, "packing": packing, "recipe": _recipe(args.recipe)})


def _request(args: argparse.Namespace, wish: Wish) -> tuple[Request, list[str]]:
    """The request, with lengths measured in a local data file, and notes on it for the user."""
    from accel_scale.planning.search.requests import build_request
    from accel_scale.reporting import plan_tables

    request = build_request(wish)
    notes = plan_tables.request_notes(request)
    if args.dataset_name and args.mean_length is None and Path(args.dataset_name).exists():
        from accel_scale.measuring.row_lengths import measured

        request, note = measured(request, args.model, args.dataset_name, args.columns)
        notes.append(note)
    return request, notes


def _recipe(text: str) -> str | PlannedRecipe:
    """A recipe's name, or what the script of ``--recipe`` declares."""
    if not text.endswith(".py"):
        return text
    from accel_scale.recipe_specs.finding import load_recipe

    return load_recipe(text).planned


def _write(args: argparse.Namespace, plan: Plan, tokens: float | None) -> WrittenPlan:
    from accel_scale.planning.search.requests import model_for_recipe
    from accel_scale.planning.search.writing import RecipeChoices, plan_files, write_files

    assert plan.best is not None
    dataset = args.dataset_name
    if dataset is not None and Path(dataset).exists():
        dataset = str(Path(dataset).resolve())
    names = ("num_generations", "beta", "vllm_gpu_memory_utilization")
    given = tuple((name, getattr(args, name)) for name in names if getattr(args, name) is not None)
    if args.vllm_gpu_memory_utilization is not None:
        given = (*given, ("use_vllm", "true"))
    recipe = RecipeChoices(model_for_recipe(args.model), dataset, tuple(args.columns), tokens, settings=given)
    if args.max_length is not None:
        recipe = replace(recipe, max_length=int(args.max_length))
    written = plan_files(plan.request, plan.best, recipe, Path(args.write))
    write_files(written)
    return written


def _verify(args: argparse.Namespace, plan: Plan) -> None:
    """Run or trace a step of the best setting; the only part of the command that loads torch."""
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    from accel_scale.reporting.plan_tables import print_verification
    from accel_scale.verifying.verify_plan import verify_plan

    assert plan.best is not None
    found: Any = verify_plan(args.model, plan.request.model, plan.best.setup)
    print_verification(found.what, found.rows, sys.stderr if args.json else sys.stdout)
