"""Measures weak and strong scaling of a recipe: the same launch on 1, 2, … ranks, with tokens/s against linear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.launching.launch_file import LaunchFile
from accel_scale.recipe_specs.finding import load_recipe
from accel_scale.rehearsing.rehearse import error_lines

if TYPE_CHECKING:
    from accel_scale.network.link_fit import MeasuredLinks

KINDS = ("weak", "strong")
# Flags that do not affect speed, or whose work would happen once per run.
_DROPPED = ("global_batch_size", "max_tokens", "num_train_epochs", "resume", "resume_from_checkpoint", "report_to")
# Flags for how gradients are sent; refused on a single rank, which sends none.
_OF_SEVERAL_RANKS = (
    "sync_each_batch", "reduce_dtype", "ddp_bucket_cap_mb", "ddp_comm_hook", "powersgd_rank", "powersgd_start_step",
)  # fmt: skip


@dataclass(frozen=True)
class ScalingRun:
    """One launch.

    Attributes:
        kind: ``weak`` for the same micro-batches per rank, ``strong`` for the same global batch.
        micro_batch_size: Rows per rank and forward pass.
        global_batch_size: Rows per optimizer step.
    """

    kind: str
    num_ranks: int
    micro_batch_size: int
    global_batch_size: int


@dataclass(frozen=True)
class ScalingResult:
    """Measurements of one launch.

    Attributes:
        tokens_per_second: Sum over all ranks.
        predicted_step_seconds: The planner's prediction for the devices here; for a CPU, whose speed it does not know,
            see `with_measured_compute`.
        step_seconds: Measured average.
        communication_seconds: Time of a step's collectives over measured links; None without measured links.
    """

    run: ScalingRun
    tokens_per_second: float
    predicted_step_seconds: float | None
    step_seconds: float = 0.0
    communication_seconds: float | None = None


def scaling_runs(ranks: Sequence[int], kinds: Sequence[str], micro_batch_size: int) -> list[ScalingRun]:
    """The runs for all kinds and rank counts.

    Args:
        ranks: Numbers of ranks, ascending.
        micro_batch_size: Rows per rank and forward pass, in both kinds.

    Raises:
        ConfigError: if the global batch of strong scaling does not divide evenly.
    """
    largest = ranks[-1]
    for number in ranks:
        if "strong" in kinds and largest % number:
            raise ConfigError(
                f"{largest} is not a multiple of {number}, so one global batch does not divide over both.",
                place="--ranks",
                fix="use powers of two, or --kind weak.",
            )
    runs = []
    for kind in kinds:
        for number in ranks:
            rows = micro_batch_size * (largest if kind == "strong" else number)
            runs.append(ScalingRun(kind, number, micro_batch_size, rows))
    return runs


def efficiency(result: ScalingResult, results: Sequence[ScalingResult]) -> float:
    """Tokens/s per rank relative to the smallest run of the same kind; 1 is linear for weak and strong scaling."""
    first = min((r for r in results if r.run.kind == result.run.kind), key=lambda r: r.run.num_ranks)
    return (result.tokens_per_second / result.run.num_ranks) / (first.tokens_per_second / first.run.num_ranks)


def predicted_efficiency(result: ScalingResult, results: Sequence[ScalingResult]) -> float | None:
    """Efficiency by the planner's step times; None if it has none."""
    first = min((r for r in results if r.run.kind == result.run.kind), key=lambda r: r.run.num_ranks)
    if not result.predicted_step_seconds or not first.predicted_step_seconds:
        return None
    speeds = [r.run.global_batch_size / r.predicted_step_seconds / r.run.num_ranks for r in (result, first)]  # type: ignore[operator]
    return speeds[0] / speeds[1]


def with_measured_compute(results: Sequence[ScalingResult]) -> list[ScalingResult]:
    """Fill in missing predictions: the compute time of the smallest run plus each run's own communication time.

    This assumes the same compute time per row on every rank in all runs, and that no communication is hidden, since
    the processor does both.
    """
    found = []
    for result in results:
        first = min((r for r in results if r.run.kind == result.run.kind), key=lambda r: r.run.num_ranks)
        own, firsts = result.communication_seconds, first.communication_seconds
        if result.predicted_step_seconds is None and own is not None and firsts is not None:
            rows, first_rows = (r.run.global_batch_size / r.run.num_ranks for r in (result, first))
            compute = max(first.step_seconds - firsts, 0.0) * rows / first_rows
            result = replace(result, predicted_step_seconds=compute + own)
        found.append(result)
    return found


def measure(
    runs: Sequence[ScalingRun],
    launch: LaunchFile,
    recipe: RecipeCommand,
    work: Path,
    *,
    num_steps: int,
    threads_per_rank: int | None,
    links: MeasuredLinks | None = None,
    on_start: Callable[[ScalingRun], None] = lambda run: None,
) -> list[ScalingResult]:
    """Launch `runs` one after the other; a shape that both kinds share is launched once.

    Args:
        work: Folder for outputs and logs.
        num_steps: Optimizer steps of each run; the first is not timed.
        threads_per_rank: Cores that every rank uses, the same in all runs; None on accelerators.
        links: Measured links of this machine, for predictions on a CPU.

    Raises:
        ConfigError: if a run fails, with its own error message.
    """
    results, known = [], {}
    for run in runs:
        shape = (run.num_ranks, run.global_batch_size)
        if shape not in known:  # the largest run is the same in both kinds
            on_start(run)
            known[shape] = _launch(run, launch, recipe, work, num_steps, threads_per_rank)
        summary = known[shape]
        compared = (summary.get("plan") or {}).get("compared") or {}
        speed = float(summary["tokens_per_second"])
        results.append(
            ScalingResult(
                run,
                speed,
                compared.get("step_seconds"),
                float(summary["tokens"]) / summary["steps"] / speed,
                communication_seconds(summary.get("plan"), run.num_ranks, links),
            )
        )
    return with_measured_compute(results)


def communication_seconds(plan: Mapping[str, Any] | None, num_ranks: int, links: MeasuredLinks | None) -> float | None:
    """Time of the collectives that a summary's `plan` lists for a step, over measured `links`; None without either."""
    from accel_scale.facts.hardware import Gpu, Machine
    from accel_scale.planning.cost.communication import Collective, collective_seconds

    if links is None or plan is None:
        return None
    machine = Machine(Gpu("CPU", 0, 0), num_gpus=num_ranks, gpus_per_node=num_ranks, links=links)
    return sum(collective_seconds(Collective(**entry), machine) for entry in plan["collectives"])


def command_of(run: ScalingRun, launch: LaunchFile, recipe: RecipeCommand, out: Path, num_steps: int) -> list[str]:
    """The `accelerate launch` command of one run.

    Raises:
        ConfigError: if the script does not declare its flags, or lacks one that every run sets.
    """
    known = load_recipe(recipe.script)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launch.path)]
    words += ["--num_processes", str(run.num_ranks), "--main_process_port", "0"]
    if (launch.values.get("num_machines") or 1) > 1:
        words += ["--num_machines", "1", "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    needed = {"per_device_train_batch_size": run.micro_batch_size, "max_steps": num_steps, "output_dir": out}
    if known.has("global_batch_size"):
        needed["global_batch_size"] = run.global_batch_size
    else:
        needed["gradient_accumulation_steps"] = run.global_batch_size // (run.micro_batch_size * run.num_ranks)
    known.require(needed, "a scaling test")
    # The plan lists the collectives, also on a CPU.
    wanted = {**known.spec.untimed, "logging_steps": num_steps, "plan": "check"}
    flags = {**{name: value for name, value in wanted.items() if known.has(name)}, **needed}
    dropped = {*_DROPPED, *flags, *(_OF_SEVERAL_RANKS if run.num_ranks == 1 else ())}
    short = recipe.without(dropped, out.parent).with_flags(**flags)
    return [*words, str(short.script), *short.words]


def _launch(
    run: ScalingRun, launch: LaunchFile, recipe: RecipeCommand, work: Path, num_steps: int, threads: int | None
) -> dict[str, Any]:
    name = f"{run.num_ranks}_ranks_{run.global_batch_size}_rows"
    command = command_of(run, launch, recipe, work / name, num_steps)
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    log = work / f"{name}.log"
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False).returncode
    path = work / name / "run_summary.json"
    if status:
        lines = error_lines(log.read_text(errors="replace"))
        raise ConfigError(f"the run on {run.num_ranks} ranks failed: {lines[0]}")
    if not path.is_file():
        raise ConfigError(
            f"wrote no {path.name}, which holds its speed.",
            place=str(recipe.script),
            fix="write one with `tokens`, `tokens_per_second`, `steps` and `world_size`.",
        )
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if summary["world_size"] != run.num_ranks or not summary["tokens_per_second"]:
        raise ConfigError(
            f"{run.num_ranks} ranks were started and the run knew of {summary['world_size']}.",
            fix="use a launch file of accelerate_configs/.",
        )
    return summary
