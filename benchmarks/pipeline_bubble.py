"""Measure how long pipeline ranks wait for each other, compared with the formula.

    python benchmarks/pipeline_bubble.py            # p = 2 and 4, m = 4, 8 and 16, every schedule; writes the results
    python benchmarks/pipeline_bubble.py --only timed --realtime    # where other programs use the machine, too

Timed stages. A stage's forward pass takes f seconds of wall time and its backward pass 2f (f for the gradient of its
input and f for that of its weight), in autograd functions that sleep. Everything else is as in training: the project's
`Pipeline`, torch's schedules and stages, and hidden states and gradients sent over gloo between processes. Sleeping
keeps stages equal and avoids measuring the contention of four computing processes on two cores. The bubble of a rank
is 1 − (seconds inside its stages) ÷ (seconds of the step); the table has the mean over ranks and the median of several
steps. `--realtime` lets these processes, which hardly compute, run as soon as they wake up (SCHED_FIFO), so that other
programs on the cores do not affect the results.

Computing stages. Two ranks of one thread each train a Llama of equal layers with a negligible head; a rank's bubble is
1 − (CPU seconds of its process) ÷ (seconds of the step), where waiting for a message uses no CPU time. It includes
what the formula leaves out: stages that are not quite equal. Only meaningful on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_scale.ending.leaving import leave_process_group

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "pipeline_bubble.json"
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
WIDTH, LENGTH = 32, 16


def timed_part(index: int, num_stages: int, clock: dict[str, float]) -> Any:
    """A stage that takes ``clock["pass"]`` seconds forward and twice that backward, and adds them to ``spent``."""
    import torch
    from torch import nn

    from accel_scale.parallel.pipelines.split import Stage

    def wait() -> None:
        started = time.perf_counter()
        time.sleep(clock["pass"])
        clock["spent"] += time.perf_counter() - started

    class OfInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            wait()
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            wait()
            return grads[0]

    class OfWeight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            wait()
            return grads[0]

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.pipeline_stage = Stage(index, num_stages, range(index, index + 1), (f"layers.{index}",), num_stages)

        def forward(self, inputs: torch.Tensor, **_: Any) -> torch.Tensor:
            stage = self.pipeline_stage
            # The first stage's input has no gradient; a separate one makes its backward pass as long as the others'.
            hidden = torch.ones(*inputs.shape, WIDTH, requires_grad=True) if stage.is_first else inputs
            hidden = OfInput.apply(hidden) * OfWeight.apply(self.weight)
            return hidden.mean() if stage.is_last else hidden

    return Part()


def measure_timed(
    schedule: str, stages_per_rank: int, micro_batches: int, seconds: float, steps: int, group: Any = None
) -> dict[str, float]:
    """Bubble of timed stages over the ranks of `group`: measured median and minimum, and predicted; same on all ranks.

    Args:
        seconds: f, for all stages of a rank together.
        steps: Number of measured steps, after a short one.
        group: Process group; None for all ranks.
    """
    import torch
    import torch.distributed as dist

    from accel_scale.parallel.pipelines.pipeline import Pipeline, PipelineSettings, stages_of_rank
    from accel_scale.planning.cost.pipeline import bubble_fraction

    group = dist.group.WORLD if group is None else group
    size, settings = dist.get_world_size(group), PipelineSettings(schedule, stages_per_rank)
    indices, num_stages = stages_of_rank(settings, size, dist.get_rank(group)), size * stages_per_rank
    clock = {"pass": 0.0, "spent": 0.0}
    parts = [timed_part(index, num_stages, clock) for index in indices]
    pipeline = Pipeline(parts, indices, num_stages, group, "cpu", settings, micro_batches)
    ids = torch.zeros((1, LENGTH), dtype=torch.long)
    batches = [{"input_ids": ids, "labels": ids}] * micro_batches
    bubbles, walls = [], []
    for _ in range(steps + 1):
        dist.barrier(group)
        clock["spent"], started = 0.0, time.perf_counter()
        pipeline.forward_backward(batches, 1)
        dist.barrier(group)
        wall = time.perf_counter() - started
        shares: list[Any] = [None] * size
        dist.all_gather_object(shares, 1 - clock["spent"] / wall, group=group)
        clock["pass"] = seconds / stages_per_rank
        bubbles.append(statistics.mean(shares))
        walls.append(wall)
    predicted = bubble_fraction(schedule, size, micro_batches, stages_per_rank)
    measured = statistics.median(bubbles[1:])
    least, seconds = min(bubbles[1:]), statistics.median(walls[1:])
    return {"measured": measured, "least": least, "predicted": predicted, "seconds": seconds}


def measure_computing(micro_batches: int, steps: int) -> dict[str, float]:
    """Bubble of two processes that train a model, from CPU seconds."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from accel_scale.parallel.pipelines.pipeline import Pipeline, PipelineSettings, split_model, stage_boundaries
    from accel_scale.parallel.pipelines.split import layer_costs
    from accel_scale.planning.cost.pipeline import bubble_fraction

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    costs = layer_costs(config.to_dict(), 256)
    parts = split_model(LlamaForCausalLM(config), stage_boundaries(costs, size), [rank])
    pipeline = Pipeline(parts, [rank], size, dist.group.WORLD, "cpu", PipelineSettings("1f1b"), micro_batches)
    ids = torch.randint(0, 64, (1, 256))
    batches = [{"input_ids": ids, "labels": ids}] * micro_batches
    bubbles, walls = [], []
    for _ in range(steps + 1):
        dist.barrier()
        busy, started = time.process_time(), time.perf_counter()
        pipeline.forward_backward(batches, 1)
        busy, wall = time.process_time() - busy, time.perf_counter() - started
        shares: list[Any] = [None] * size
        dist.all_gather_object(shares, 1 - busy / wall)
        bubbles.append(statistics.mean(shares))
        walls.append(wall)
    measured = statistics.median(bubbles[1:])
    predicted = bubble_fraction("1f1b", size, micro_batches)
    return {"measured": measured, "predicted": predicted, "seconds": statistics.median(walls[1:])}


def run_rank(args: argparse.Namespace) -> None:
    """Entry point of every process of a launch; rank 0 prints one JSON line per case."""
    import torch.distributed as dist

    import accel_scale.parallel.pipelines.pipeline  # noqa: F401  before anything is timed

    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    dist.init_process_group("gloo")
    cases = [("1f1b, computing", 1)] if args.only == "computing" else SCHEDULES
    for count in args.micro_batches:
        for schedule, stages in cases:
            if args.only == "computing":
                found = measure_computing(count, args.steps)
            else:
                found = measure_timed(schedule, stages, count, args.seconds, args.steps)
            line = {"p": dist.get_world_size(), "m": count, "schedule": schedule, "stages_per_rank": stages, **found}
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
    leave_process_group()


def launch(size: int, args: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Run one launch of `size` processes."""
    from apart import run_apart

    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--standalone", __file__]
    command += ["--worker", "--only", kind, "--micro_batches", *map(str, args.micro_batches)]
    command += ["--seconds", str(args.seconds), "--steps", str(args.steps), *(["--realtime"] if args.realtime else [])]
    os.environ["OMP_NUM_THREADS"] = "1"
    text, problem = run_apart(command, limit_seconds=1800)
    if problem:
        raise SystemExit(f"{size} processes: {problem}")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all rows, and record the machine they were measured on."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    load = os.getloadavg()[0]
    rows = [row for size in ((2, 4) if kind == "timed" else (2,)) for row in launch(size, args, kind)]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip()}, "
        f"load average {load:.1f} at the start" + (", real-time priority" if args.realtime else ""),
        "seconds": args.seconds,
        "steps": args.steps,
        "rows": rows,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| schedule | ranks p | stages per rank v | micro-batches m | predicted | measured | off by | step, s |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: (row["schedule"], row["p"], row["m"])):
        off = row["measured"] / row["predicted"] - 1
        lines.append(
            f"| {row['schedule']} | {row['p']} | {row['stages_per_rank']} | {row['m']} | {row['predicted']:.2%} | "
            f"{row['measured']:.2%} | {off:+.1%} | {row['seconds']:.2f} |"
        )
    return "\n".join(lines)


def document(found: dict[str, Any]) -> str:
    """The committed results page."""
    lines = ["# The bubble of pipelines, measured", ""]
    lines += ["Made by `python benchmarks/pipeline_bubble.py`, whose first lines say how it is measured."]
    if "timed" in found:
        timed = found["timed"]
        worst = max(abs(row["measured"] / row["predicted"] - 1) for row in timed["rows"])
        lines += ["", "## Timed stages", "", f"{timed['machine']}. Medians of {timed['steps']} steps."]
        lines += [f"A rank's stages sleep for {timed['seconds'] * 1000:.0f} ms together in a forward pass and twice"]
        lines += ["as long in a backward pass; schedules, stages and messages between processes are real."]
        lines += [f"The largest difference from the formula is {worst:.1%} of it.", "", table(timed["rows"])]
    if "computing" in found:
        computing = found["computing"]
        lines += ["", "## Computing stages", "", f"{computing['machine']}. Medians of {computing['steps']} steps."]
        lines += ["Two processes of one thread each, a Llama of 8 layers of 384, rows of 256 tokens.", ""]
        lines += [table(computing["rows"])]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="f of a rank: forward pass of a micro-batch")
    parser.add_argument("--steps", type=int, default=2, help="measured, of each case")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--only", choices=("timed", "computing"), help="one of the two; the other's results stay")
    parser.add_argument("--realtime", action="store_true", help="SCHED_FIFO for timed stages; needs the right to it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_rank(args)
        return
    if args.realtime and args.only != "timed":
        parser.error("--realtime is for --only timed: computing processes would take the machine from all others")
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for kind in (args.only,) if args.only else ("timed", "computing"):
        found[kind] = measure(kind, args)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = document(found)
    RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
