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
from accel_scale.facts.names import METHODS, PIPELINE_SCHEDULES, PRECISIONS
from accel_scale.facts.stacks import STACKS
from accel_scale.planning.search.recipe_choices import PLANNED_RECIPES
from accel_scale.planning.search.wish import Wish

if TYPE_CHECKING:
    from accel_scale.planning.search.recipe_choices import PlannedRecipe
    from accel_scale.planning.search.search import Plan, Request
    from accel_scale.planning.search.writing import WrittenPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale plan`; those that the recipe has too are called the same."""
    parser.add_argument("model", metavar="MODEL", help="the model to train")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpu", help='a card, e.g. "RTX 4090", H100, 24GiB (default: those of this machine)')
    machine.add_argument("--num_gpus", metavar="N", help="all GPUs together (default: 1, or those of this machine)")
    machine.add_argument("--gpus_per_node", metavar="N", help="GPUs that share fast links (default: 8)")
    machine.add_argument("--network", help="between nodes, e.g. infiniband-ndr, ethernet-100g, 25GB (per second)")
    machine.add_argument("--host_memory", help="host memory of one node, e.g. 512GiB; not checked if not given")
    machine.add_argument("--host_bandwidth", metavar="SPEED", help="bandwidth of host memory per second, e.g. 200GB")
    machine.add_argument("--nvme", metavar="SPEED", help="speed of a node's NVMe drives per second, e.g. 6GB")
    machine.add_argument(
        "--links", metavar="FILE", help="links measured by accel-scale comm; `measured`: the last file written here"
    )
    training = parser.add_argument_group("training, as the recipe's flags")
    training.add_argument(
        "--method", default=Wish.method, help=f"{', '.join(METHODS)}, or auto: any of them (default: %(default)s)"
    )
    training.add_argument("--precision", help=f"{', '.join(PRECISIONS)} (default: bf16 if supported)")
    training.add_argument("--optim", help="optimizer (default: fused AdamW, or 8-bit states if they help)")
    training.add_argument(
        "--checkpointing_policy", help="activation checkpointing (default: the fastest of none, selective and full)"
    )
    training.add_argument("--attn_implementation", help="eager, sdpa, flash_attention_2 … (default: sdpa)")
    training.add_argument(
        "--per_device_train_batch_size", metavar="N", help="micro-batch (default: the fastest that fits)"
    )
    training.add_argument(
        "--global_batch_size",
        metavar="N",
        default=Wish.global_batch_size,
        help="sequences per optimizer step (default: %(default)s)",
    )
    training.add_argument("--max_length", metavar="TOKENS", help="tokens per row (default: 2048)")
    training.add_argument("--mean_length", metavar="TOKENS", help="mean tokens of a row without padding")
    training.add_argument(
        "--sync_each_batch",
        nargs="?",
        const="true",
        help="FSDP2 reduces gradients after every micro-batch: true or false (default: whichever is faster)",
    )
    training.add_argument(
        "--long_rows",
        nargs="?",
        const="true",
        help="MLPs and norms in tiles, layer inputs in host memory: true or false (default: false)",
    )
    training.add_argument("--packing", nargs="?", const="true", default="true", help="true or false (default: true)")
    training.add_argument("--no_packing", action="store_true", help="rows hold one document each and are padded")
    training.add_argument(
        "--lora_r", metavar="RANK", default=Wish.lora_r, help="rank of the adapters (default: %(default)s)"
    )
    training.add_argument("--lora_target_modules", nargs="+", metavar="NAME", default=Wish.lora_target_modules)
    training.add_argument(
        "--lora_dropout", metavar="P", default=Wish.lora_dropout, help="dropout of the adapters (default: %(default)s)"
    )
    training.add_argument("--use_dora", action="store_true", help="adapters with a magnitude vector")
    training.add_argument(
        "--dataset_name", metavar="DATA", help="data set; the row lengths of local files are measured"
    )
    training.add_argument("--columns", nargs="+", metavar="ROLE=COLUMN", default=[], help="as in the recipe")
    sharing = parser.add_argument_group("ranks that share the model, as recipes/pretrain.py's flags")
    sharing.add_argument(
        "--recipe",
        default=Wish.recipe,
        help=f"recipe that will run it: {', '.join(PLANNED_RECIPES)} (the last for tensor and pipeline parallelism), "
        "or a script that declares a RECIPE (default: %(default)s)",
    )
    sharing.add_argument("--tp_size", metavar="N", help="tensor parallelism (default: tried if nothing simpler fits)")
    sharing.add_argument("--pp_size", metavar="N", help="pipeline stages (default: as --tp_size)")
    sharing.add_argument("--sp_size", metavar="N", help="Ulysses sequence parallelism (default: as --tp_size)")
    sharing.add_argument("--pp_schedule", help=f"{', '.join(PIPELINE_SCHEDULES)} (default: {PIPELINE_SCHEDULES[0]})")
    preferences = parser.add_argument_group("preferences and rewards, as the flags of their recipes")
    preferences.add_argument(
        "--precompute_ref_log_probs", action="store_true", help="dpo, kto: what the reference says is computed before"
    )
    preferences.add_argument(
        "--num_generations", metavar="N", help="answers to each prompt (default: 8 of grpo, 2 of rloo)"
    )
    preferences.add_argument(
        "--max_prompt_length", metavar="TOKENS", help="grpo, rloo: tokens of the longest prompt (default: 512)"
    )
    preferences.add_argument(
        "--max_completion_length", metavar="TOKENS", help="grpo, rloo: tokens of an answer, at most (default: 512)"
    )
    preferences.add_argument(
        "--beta", metavar="WEIGHT", help="above 0 a reference is kept (default: 0 of grpo, 0.05 of rloo)"
    )
    training.add_argument(
        "--stack",
        default=Wish.stack,
        help=f"plan what this stack would need: {', '.join(STACKS)} (default: %(default)s)",
    )
    answer = parser.add_argument_group("answer")
    answer.add_argument(
        "--strategy", action="append", default=[], help='only this strategy, e.g. "ZeRO-2"; repeatable'
    )
    answer.add_argument("--tokens", metavar="D", help="token budget, e.g. 1B: adds hours, energy and price")
    answer.add_argument("--price_per_gpu_hour", metavar="PRICE", help="in any currency")
    answer.add_argument("--top", metavar="N", default="5", help="rows of the table (default: 5)")
    answer.add_argument(
        "--explain", action="store_true", help="print the memory terms of the best setting, phase by phase"
    )
    answer.add_argument("--verify", action="store_true", help="run one step of the best setting and compare")
    answer.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    answer.add_argument("--write", metavar="DIR", help="write launch file and recipe flags of the best setting")
    plan_questions.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 if nothing fits."""
    import gc

    # Hundreds of thousands of sizes come and go with their last reference: looking for circles is a tenth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _run(args)
    finally:
        if collects:
            gc.enable()


def _run(args: argparse.Namespace) -> int:
    from accel_scale.planning.search.requests import flag_places, whole
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
    """What was typed, as the planner takes it."""
    from accel_scale.planning.models.catalogue import is_on_hub
    from accel_scale.planning.search.requests import one_of

    if is_on_hub(args.model):
        from accel_scale.launching.hub_reach import give_up_if_unreachable

        give_up_if_unreachable()
    values = {f.name: getattr(args, f.name) for f in fields(Wish)}
    lists = {name: tuple(values[name]) for name in ("lora_target_modules", "strategy")}
    packing = one_of(args.packing.lower(), ("true", "false"), "--packing") == "true" and not args.no_packing
    # Before its micro-batch is known a step has as many rows as it takes.
    batch = {"global_batch_size": str(2**20)} if args.largest_batch else {}
    return Wish(**{**values, **lists, **batch, "packing": packing, "recipe": _recipe(args.recipe)})


def _request(args: argparse.Namespace, wish: Wish) -> tuple[Request, list[str]]:
    """The request, with lengths of a local data file, and what the user should know about it."""
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
    """A name, or what the script of ``--recipe`` declares."""
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
    given = tuple(
        (name, getattr(args, name)) for name in ("num_generations", "beta") if getattr(args, name) is not None
    )
    recipe = RecipeChoices(model_for_recipe(args.model), dataset, tuple(args.columns), tokens, settings=given)
    if args.max_length is not None:
        recipe = replace(recipe, max_length=int(args.max_length))
    written = plan_files(plan.request, plan.best, recipe, Path(args.write))
    write_files(written)
    return written


def _verify(args: argparse.Namespace, plan: Plan) -> None:
    """A real or traced step of the best setting; the one part of the command that loads torch."""
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    from accel_scale.reporting.plan_tables import print_verification
    from accel_scale.verifying.verify_plan import verify_plan

    assert plan.best is not None
    found: Any = verify_plan(args.model, plan.request.model, plan.best.setup)
    print_verification(found.what, found.rows, sys.stderr if args.json else sys.stdout)
