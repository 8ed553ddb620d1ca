"""Questions of `accel-scale plan`: longest row, largest batch, cheapest machine, what-if changes, inference."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from accel_scale.planning.cost.inference import InferenceEstimate
    from accel_scale.planning.search.plan import Plan, Request
    from accel_scale.planning.search.wish import Wish

_SIZES = re.compile(r"(\d+)[x×](\d+)")
# Each has its own kind of answer.
QUESTIONS = ("longest", "largest_batch", "cheapest", "what_if", "inference")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each question."""
    questions = parser.add_argument_group("questions, one at a time")
    questions.add_argument(
        "--longest", action="store_true", help="plan for the longest rows that fit, one on each GPU at a time"
    )
    questions.add_argument(
        "--largest_batch", action="store_true", help="plan for the largest micro-batch that fits, one pass a step"
    )
    questions.add_argument(
        "--cheapest", action="store_true", help="rank the machines of --price for a job of --tokens tokens"
    )
    questions.add_argument(
        "--price", metavar="TABLE.yaml", help="prices of a GPU and hour: `H100: 2.40`, or price and num_gpus"
    )
    questions.add_argument(
        "--what_if", nargs="+", metavar="FLAG=VALUE", help="compare with each change alone; max_length=x2 doubles it"
    )
    questions.add_argument(
        "--inference", metavar="BATCHxTOKENS", help="memory to answer with the trained model, e.g. 8x4096"
    )


def check(args: argparse.Namespace) -> None:
    """Refuse questions that exclude each other, and flags that belong to none of them.

    Raises:
        ConfigError: for the first one found.
    """
    asked = [name for name in QUESTIONS if getattr(args, name)]
    if len(asked) > 1:
        raise ConfigError("one question at a time.", place=f"--{asked[1]}", fix=f"remove it or --{asked[0]}.")
    if bool(args.price) != args.cheapest:
        place, fix = ("--price", "add --cheapest.") if args.price else ("--cheapest", "add --price TABLE.yaml.")
        raise ConfigError("a price table and --cheapest go together.", place=place, fix=fix)
    if args.cheapest and args.tokens is None:
        raise ConfigError("there is no job to price.", place="--cheapest", fix="add --tokens, like 1B.")
    for name in ("gpu", "num_gpus", "price_per_gpu_hour"):
        if args.cheapest and getattr(args, name) is not None:
            raise ConfigError("the price table says which machines.", place=f"--{name}", fix="remove it.")
    if args.write and args.stack != "ours":
        raise ConfigError("plans of other stacks are not written.", place="--write", fix="remove it or --stack.")
    tables = [name for name in ("cheapest", "what_if", "inference") if getattr(args, name)]
    for name in ("write", "verify", "explain"):
        if tables and getattr(args, name):
            raise ConfigError(f"--{tables[0]} makes no plan for it.", place=f"--{name}", fix="remove it.")


def extreme(args: argparse.Namespace, request: Request, notes: list[str]) -> Plan:
    """The plan of ``--longest`` or ``--largest_batch``, with a note that states it.

    Raises:
        ConfigError: for flags whose values the question itself determines, and if nothing fits.
    """
    from accel_scale.planning.search import questions

    decided = ["per_device_train_batch_size", *(["max_length", "mean_length", "dataset_name"] if args.longest else [])]
    for name in decided:
        if getattr(args, name) is not None:
            what = "the length of one full row" if args.longest else "it"
            asked = "longest" if args.longest else "largest_batch"
            raise ConfigError(f"--{asked} finds {what}.", place=f"--{name}", fix="remove it.")
    model = request.model
    if args.largest_batch:
        plan = questions.largest_batch(request)
        assert plan.best is not None
        examples = plan.best.setup.micro_batch_size // request.recipe.rows_per_example
        notes.append(f"the largest micro-batch that fits: {examples} of {request.sequence_length:,} tokens.")
        return plan
    plan = questions.longest_row(request)
    length = plan.request.sequence_length
    notes.append(f"the longest row that fits: {length:,} tokens.")
    if model.max_positions and length > model.max_positions:
        notes.append(f"{model.name} was made for {model.max_positions} tokens.")
    return plan


def answer(args: argparse.Namespace, wish: Wish, tokens: float | None) -> int | None:
    """Print the table of ``--cheapest``, ``--what_if`` or ``--inference``; returns the exit status, or None.

    Raises:
        ConfigError: as raised by the questions.
    """
    from accel_scale.planning.search import questions
    from accel_scale.reporting import question_tables

    if args.inference:
        estimates = _inference(args)
        document: dict[str, object] = {"inference": [asdict(found) for found in estimates]}
        if not args.json:
            question_tables.print_inference(args.model, estimates)
        found = True
    elif args.cheapest:
        from accel_scale.planning.search.prices import read_prices

        assert tokens is not None
        plans = questions.cheapest_plans(wish, read_prices(args.price), tokens)
        document = {"cheapest": [question_tables.priced_dict(plan) for plan in plans]}
        if not args.json:
            question_tables.print_cheapest(plans, tokens)
        found = any(plan.best for plan in plans)
    elif args.what_if:
        differences = questions.compare(wish, args.what_if)
        document = {"what_if": [question_tables.difference_dict(item) for item in differences]}
        if not args.json:
            question_tables.print_differences(differences)
        found = differences[0].best is not None
    else:
        return None
    if args.json:
        print(json.dumps(document, indent=2))
    return 0 if found else 1


def _inference(args: argparse.Namespace) -> tuple[InferenceEstimate, ...]:
    from accel_scale.planning.search.api import inference_memory

    match = _SIZES.fullmatch(args.inference)
    if match is None:
        raise ConfigError(
            f"{args.inference!r} is no batch and length.", place="--inference", fix="write it like 8x4096."
        )
    return inference_memory(args.model, batch=int(match[1]), length=int(match[2]))
