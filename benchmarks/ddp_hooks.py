"""What DDP's communication hooks send and what they cost the loss: recipes/pretrain.py on two processes.

    python benchmarks/ddp_hooks.py            # writes benchmarks/results/ddp_hooks.md

The model, weights and batches of the embedded text are the same, in fp32, so that only the communicated data differ.
Bytes are those that a rank passes to all-reduces in a step, from the recipe's summary. The loss is on held-out text
after the last step; another seed, and a learning rate that differs in the fourth digit, show which differences are
significant.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "ddp_hooks.md"
# 0.01 % above the recipe's own learning rate: makes rounding visible, which training amplifies.
NUDGED = "0.0030003"
HOOKS = {
    "none": [],
    "bf16": ["--ddp_comm_hook", "bf16"],
    "fp16": ["--ddp_comm_hook", "fp16"],
    "powersgd, rank 16": ["--ddp_comm_hook", "powersgd", "--powersgd_rank", "16"],
    "powersgd, rank 4": ["--ddp_comm_hook", "powersgd", "--powersgd_rank", "4"],
    "powersgd, rank 1": ["--ddp_comm_hook", "powersgd", "--powersgd_rank", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--start_step", type=int, default=20, help="of PowerSGD: a tenth of the steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of the runs without a hook")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    for name, flags in HOOKS.items():
        if "powersgd" in name:
            flags = [*flags, "--powersgd_start_step", str(args.start_step)]
        runs[name] = run(args, flags, seed=args.seeds[0])
        print(name, runs[name]["eval_loss"], runs[name]["ddp"], flush=True)
    others = {f"seed {seed}": run(args, [], seed=seed)["eval_loss"] for seed in args.seeds[1:]}
    others["a learning rate 0.01 % higher"] = run(args, ["--learning_rate", NUDGED], seed=args.seeds[0])["eval_loss"]
    args.output.write_text(table(args, runs, others), encoding="utf-8")
    print(f"written {args.output}")


def run(args: argparse.Namespace, flags: list[str], *, seed: int) -> dict[str, Any]:
    """Run one launch and return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(REPOSITORY / "accelerate_configs" / "ddp.yaml")]
        command += ["--num_processes", str(args.processes), "--main_process_port", "0", "--mixed_precision", "no"]
        command += [str(REPOSITORY / "recipes" / "pretrain.py"), "--output_dir", folder, "--seed", str(seed)]
        command += ["--max_steps", str(args.steps), "--precision", "fp32", "--global_batch_size", "16"]
        command += ["--per_device_train_batch_size", "8", "--sample_tokens", "0", "--eval_steps", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=REPOSITORY)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        return json.loads((Path(folder) / "run_summary.json").read_text(encoding="utf-8"))


def table(args: argparse.Namespace, runs: dict[str, dict[str, Any]], others: dict[str, float]) -> str:
    import torch

    from accel_scale.measuring.collective_runs import processor_name

    plain = runs["none"]
    params = plain["parameters"]["trainable"]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=REPOSITORY
    ).stdout.strip()
    lines = [
        "# DDP communication hooks: bytes sent and loss",
        "",
        f"`python benchmarks/ddp_hooks.py --steps {args.steps} --start_step {args.start_step}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit or 'unknown'}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {processor_name()}.",
        "",
        f"`recipes/pretrain.py` on {args.processes} processes over gloo: {params / 1e6:.2f}M parameters from nothing, "
        f"{args.steps} steps of 16 rows of 128 tokens of the embedded text, fp32. PowerSGD begins with step "
        f"{args.start_step}. Bytes: what a rank gives to all-reduces in the last step; a ring sends 2(N−1)/N of it.",
        "",
        "| hook | bytes per step | share | training loss, last step | held-out loss | against none |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, summary in runs.items():
        sent = summary["ddp"]["sent_bytes_per_step"] if summary["ddp"] else 4 * params
        off = summary["eval_loss"] - plain["eval_loss"]
        cells = [f"{sent:,}", f"{sent / (4 * params):.1%}", f"{summary['losses'][-1]:.4f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {summary['eval_loss']:.4f} | {off:+.4f} |")
    lines += ["", "How far apart runs without a hook end that should be as good as each other:", ""]
    for name, loss in others.items():
        lines.append(f"- {name}: {loss:.4f}, {loss - plain['eval_loss']:+.4f}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
