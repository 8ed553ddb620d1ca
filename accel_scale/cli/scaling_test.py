"""Run a recipe on 1, 2, … ranks of this machine and compare its tokens per second with linear scaling.

  accel-scale scaling-test --config_file accelerate_configs/ddp.yaml recipes/pretrain.py --num_params 124M \\
      --train_tokenizer --data 'web/*.jsonl' --per_device_train_batch_size 8

Weak scaling keeps the rows per rank, strong scaling the rows per optimizer step (more ranks, less accumulation).
Checkpoints, validation and samples are left out. On a CPU every rank has the same number of cores in all runs, so a
run on one rank leaves the others' idle: the comparison shows the cost of communication and of the shared memory bus.
There the prediction is the smallest run's compute time plus its collectives over the links measured by `accel-scale
comm --measure`; on GPUs it is the planner's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.rehearsing.recipe_words import mark_recipe, work_folder

if TYPE_CHECKING:
    from accel_scale.network.link_fit import MeasuredLinks

_VALUE_FLAGS = ("--config_file", "--ranks", "--kind", "--steps", "--keep", "--links")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale scaling-test`."""
    parser.add_argument("--config_file", required=True, help="the launch file")
    parser.add_argument("--ranks", help="numbers of ranks, e.g. 1,2,4,8 (default: powers of two up to the devices)")
    parser.add_argument("--kind", choices=("weak", "strong", "both"), default="both", help="default: both")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default: 20)")
    parser.add_argument("--keep", metavar="FOLDER", help="keep logs and results here")
    parser.add_argument("--links", metavar="FILE", help="measured by accel-scale comm (default: the last ones here)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("recipe", nargs="+", help="the recipe and its flags, as after accelerate launch")


def arrange(words: Sequence[str]) -> list[str]:
    """See `mark_recipe`."""
    return mark_recipe(words, _VALUE_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Measure, then print."""
    from accel_scale.launching.machine import refuse_native_windows

    refuse_native_windows()
    with work_folder(args.keep, "scaling-test-") as folder:
        return _run(args, folder)


def _run(args: argparse.Namespace, work: Path) -> int:
    from accel_scale.flags.command_line import RecipeCommand
    from accel_scale.launching.launch_file import read_launch_file
    from accel_scale.launching.machine import detect_machine
    from accel_scale.rehearsing.scaling_runs import KINDS, efficiency, measure, predicted_efficiency, scaling_runs

    if args.steps < 3:
        raise ConfigError(f"{args.steps} steps cannot be timed.", place="--steps", fix="use 3 or more.")
    launch = read_launch_file(args.config_file)
    if launch.parallel.kind.is_single:
        raise ConfigError(
            "this launch file starts one process.", place=launch.place("distributed_type"), fix="use ddp.yaml."
        )
    recipe = RecipeCommand.parse(args.recipe[0], args.recipe[1:])
    machine = detect_machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    available = machine.num_devices or cores
    ranks = _ranks(args.ranks, available)
    threads = None if machine.num_devices else cores // ranks[-1]
    micro = int(recipe.value("per_device_train_batch_size", 8))
    links = _links(args.links, is_needed=not machine.num_devices)
    runs = scaling_runs(ranks, KINDS if args.kind == "both" else (args.kind,), micro)
    results = measure(
        runs, launch, recipe, work, num_steps=args.steps, threads_per_rank=threads, links=links,
        on_start=lambda r: print(f"{r.num_ranks} ranks, {r.global_batch_size} rows per step …", file=sys.stderr),
    )  # fmt: skip
    rows = [
        {
            "scaling": r.run.kind, "ranks": r.run.num_ranks, "rows_per_step": r.run.global_batch_size,
            "tokens_per_second": r.tokens_per_second, "efficiency": efficiency(r, results),
            "predicted_efficiency": predicted_efficiency(r, results),
        }
        for r in results
    ]  # fmt: skip
    where = f"{machine.device_name}, {threads} cores per rank" if threads else machine.device_name
    if args.json:
        found = {"strategy": launch.parallel.label, "device": where, "threads_per_rank": threads, "runs": rows}
        print(json.dumps(found, indent=2))
        return 0
    print(f"{launch.parallel.label} on {where}, {args.steps} steps of {recipe.script.name}, the first not timed")
    print(f"{'scaling':<8} {'ranks':>5} {'rows/step':>10} {'tokens/s':>12} {'of linear':>10} {'predicted':>10}")
    for row in rows:
        predicted = f"{row['predicted_efficiency']:.0%}" if row["predicted_efficiency"] else "–"
        print(
            f"{row['scaling']:<8} {row['ranks']:>5} {row['rows_per_step']:>10} {row['tokens_per_second']:>12,.0f} "
            f"{row['efficiency']:>10.0%} {predicted:>10}"
        )
    return 0


def _links(name: str | None, *, is_needed: bool) -> MeasuredLinks | None:
    """The links in the file, or the last ones measured here if the planner has no others."""
    from accel_scale.network.link_fit import default_path, load_links

    if name is not None:
        return load_links(name)
    if not is_needed:
        return None
    if default_path().is_file():
        return load_links(default_path())
    print("note: no prediction without this machine's links; accel-scale comm --measure finds them.", file=sys.stderr)
    return None


def _ranks(text: str | None, available: int) -> list[int]:
    if text is None:
        return [2**power for power in range(available.bit_length()) if 2**power <= available]
    try:
        ranks = sorted({int(word) for word in text.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise ConfigError(f"{text!r} are not numbers of ranks.", place="--ranks", fix="write them like 1,2,4.")
    if ranks[-1] > available:
        raise ConfigError(
            f"{ranks[-1]} ranks, and there are {available} devices or cores.",
            place="--ranks",
            fix=f"use at most {available}: ranks that share one say nothing about scaling.",
        )
    return ranks
