"""A plain Accelerate loop with a `CheckpointManager`, for `test_checkpoints_sharded.py`.

accelerate launch --config_file F checkpoint_run.py --output_dir D --report R.json                one run
accelerate launch --config_file F --num_processes 1 checkpoint_run.py --runs runs.json            several, of any size

``runs.json`` lists ``{"argv", "port", "log", "num_processes"}``: the libraries are imported once, each run then
forks its ranks with the launch's environment. Rows depend only on the step, so that a global batch
is the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from run_recipe_forked import run_once, status_of
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale import ConfigError
from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.ending.user_errors import CheckpointNotSaved
from accel_scale.facts.exit_statuses import EXIT_STOPPED, FULL_DISK_STATUS
from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
from accel_scale.plugin.preparing import step_once_per_update
from accel_scale.training.checkpoints.manager import CheckpointManager

GLOBAL_BATCH_SIZE, LENGTH, VOCABULARY = 4, 16, 64


class Counter:
    """A registered object: counts the steps that it has seen."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        self.steps = list(state["steps"])


def several(runs: list[dict]) -> int:
    """Run `runs` one after the other, forking their ranks; returns the status of the first that failed."""
    preload()
    worst = 0
    for run in runs:
        size = str(run["num_processes"])
        children = []
        for rank in map(str, range(run["num_processes"])):
            child = os.fork()
            if child == 0:
                os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
                os.environ.update(MASTER_ADDR="127.0.0.1")
                os._exit(run_once({**run, "recipe": __file__}))
            children.append(child)
        for child in children:
            status = status_of(child, Path(run["log"]))
            worst = worst or status
    return worst


def preload() -> None:
    """Import what every rank would import anyway: DeepSpeed whatever the strategy, and what a step needs."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.AdamW([weight]).step()


def batch_of(step: int, accelerator: Accelerator) -> torch.Tensor:
    """This rank's rows of a step's global batch."""
    rows = torch.randint(
        0, VOCABULARY, (GLOBAL_BATCH_SIZE, LENGTH), generator=torch.Generator().manual_seed(1000 + step)
    )
    return rows[accelerator.process_index :: accelerator.num_processes]


def kill_when_there(path: Path) -> None:
    """Kill this process with SIGKILL, which nothing can handle, once `path` exists."""
    while not path.exists():
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGKILL)


def one(args: argparse.Namespace) -> None:
    """Train, save and resume as the flags say; rank 0 writes the report."""
    enable_rehearsal_if_needed()
    if args.layout:
        os.environ["FSDP_STATE_DICT_TYPE"] = args.layout  # as the launch file's fsdp_state_dict_type would be passed
    # The launch files leave accumulation to the script.
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = (
            GLOBAL_BATCH_SIZE // accelerator.num_processes
        )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        attention_dropout=args.dropout,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + 0.3 * done))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if not args.schedule_counts_ranks:
        step_once_per_update(scheduler)
    manager = CheckpointManager(accelerator, args.output_dir, keep_last=None, asynchronous=args.asynchronous)
    if args.killed_at and accelerator.process_index == 1:
        threading.Thread(target=kill_when_there, args=(Path(args.output_dir, args.killed_at),), daemon=True).start()
    counter = Counter()
    manager.register("counter", counter)
    resumed = manager.resume(args.resume)
    for name, seed in (("python", random.seed), ("numpy", np.random.seed), ("torch", torch.manual_seed)):
        if resumed is None:
            seed(len(name) + accelerator.process_index)  # different numbers on every rank
    model.train()
    if args.save_at == 0:
        manager.save(0)
    report = {"resumed": resumed and resumed.step, "state": resumed and resumed.state, "losses": {}, "draws": {}}
    for step in range((resumed.step if resumed else 0) + 1, args.num_steps + 1):
        rows = batch_of(step, accelerator)
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.steps.append(step)
        draws = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        report["losses"][step] = accelerator.gather(loss.detach().double().reshape(1)).mean().item()
        report["draws"][step] = accelerator.gather(draws).tolist()
        stopping = manager.should_stop()
        if step == args.save_at or stopping or (args.save_every and step % args.save_every == 0):
            manager.save(step, {"rows": step * GLOBAL_BATCH_SIZE}, final=stopping)
        # A single write: unbuffered print() makes two, and another rank's line may come between them.
        sys.stdout.write(f"rank {accelerator.process_index} pid {os.getpid()} step {step}\n")
        sys.stdout.flush()
        if stopping:
            manager.finish()
            let_go_of_collectives()
            accelerator.end_training()
            sys.stdout.write(f"leaving with {EXIT_STOPPED}\n")
            sys.stdout.flush()
            sys.exit(EXIT_STOPPED)
    manager.finish()
    report["counter"] = counter.steps
    report["learning_rate"] = optimizer.param_groups[0]["lr"]
    if accelerator.is_main_process:
        Path(args.report).write_text(json.dumps(report))
    let_go_of_collectives()
    accelerator.end_training()


def main() -> int | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--output_dir")
    parser.add_argument("--report", default=os.devnull)
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--num_steps", type=int, default=6)
    parser.add_argument("--save_at", type=int, default=-1)
    parser.add_argument("--save_every", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--killed_at", help="the second rank is killed when this file of the output folder appears")
    parser.add_argument("--schedule_counts_ranks", action="store_true", help="as Accelerate has it")
    parser.add_argument("--layout", help="FSDP2's")
    parser.add_argument("--asynchronous", action="store_true")
    args = parser.parse_args()
    if args.runs:
        return several(json.loads(args.runs.read_text()))
    try:
        return one(args)
    except ConfigError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return 2
    except CheckpointNotSaved as error:
        print(f"error: {error}", file=sys.stderr)
        return FULL_DISK_STATUS


if __name__ == "__main__":
    sys.exit(main())
