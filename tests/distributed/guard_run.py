"""Training through poisoned batches with the guard, compared with ordinary loops that never see those batches.

    accelerate launch --config_file F guard_run.py --output_dir D [--fp16]

All runs train the same small model on the same rows. Some rows have a non-finite loss weight, others have one
that makes a spike. Reports the largest differences of weights, optimizer state and learning rate, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale import Guard, GuardedStep, GuardSettings
from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
from accel_scale.modeling.precision import enable_fp16_on_cpu
from accel_scale.training.guard.events import read_events
from accel_scale.training.guard.verdict import stop_run

NUM_STEPS, MICRO_BATCHES, ROWS, LENGTH, VOCABULARY = 32, 2, 4, 16, 64
# step → (rank, micro-batch, loss weight): at the first step, before spikes are judged, and in consecutive steps.
POISON = {1: (0, 0, math.nan), 4: (1, 1, math.inf), 22: (1, 0, 400.0), 23: (0, 1, math.nan), 30: (0, 1, 400.0)}
SPIKES = {step for step, (_, _, weight) in POISON.items() if math.isfinite(weight)}
SETTINGS = {"window": 16, "min_steps": 8}
LR_STEPS, LR_FACTOR = 3, 0.25


def make_steps(world_size: int) -> list[list[list[dict[str, Any]]]]:
    """[step][rank][micro-batch]: rows of counting sequences with different numbers of labels."""
    random.seed(7)
    steps = []
    for number in range(1, NUM_STEPS + 1):
        ranks = []
        for rank in range(world_size):
            batches = []
            for micro in range(MICRO_BATCHES):
                where = POISON.get(number)
                weight = where[2] if where and (where[0] % world_size, where[1]) == (rank, micro) else 1.0
                batches.append(_micro_batch(f"step{number}.rank{rank}.batch{micro}", weight))
            ranks.append(batches)
        steps.append(ranks)
    return steps


def _micro_batch(name: str, weight: float) -> dict[str, Any]:
    rows = []
    for _ in range(ROWS):
        start, stride = random.randrange(VOCABULARY), random.randrange(1, 4)
        rows.append([(start + stride * k) % VOCABULARY for k in range(LENGTH)])
    ids = torch.tensor(rows)
    labels = ids.clone()
    for row in labels:
        row[: random.randrange(1, LENGTH // 2)] = -100
    # Only one row of the batch is bad.
    weights = torch.ones(ROWS)
    weights[2] = weight
    return {
        "ids": [f"{name}.row{k}" for k in range(ROWS)],
        "input_ids": ids,
        "labels": labels,
        "weights": weights,
        "num_tokens": int((labels[:, 1:] != -100).sum()),
    }


def summed_loss(model: Any, batch: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Cross-entropy summed over the labelled tokens, times each row's weight."""
    logits = model(input_ids=batch["input_ids"].to(device)).logits.float()
    labels = batch["labels"].to(device)
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return (losses.view(ROWS, -1).sum(1) * batch["weights"].to(device)).sum()


class Training:
    """A freshly prepared model with optimizer and schedule."""

    def __init__(self, accelerator: Accelerator) -> None:
        accelerator.free_memory()
        accelerator.scaler = None  # a new one for every run
        enable_fp16_on_cpu(accelerator)
        set_seed(1)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                max_position_embeddings=LENGTH,
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
        if accelerator.state.deepspeed_plugin is not None:
            accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = ROWS
        self.accelerator = accelerator
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self.model.train()

    def ordinary(self, steps: list, lower_after: tuple[int, ...] = ()) -> list[float]:
        """Train in Accelerate's own way, with a lower learning rate in `LR_STEPS` steps from each of `lower_after`."""
        accelerator, losses = self.accelerator, []
        for number, ranks in enumerate(steps, 1):
            factor = LR_FACTOR if any(first <= number < first + LR_STEPS for first in lower_after) else 1.0
            before = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
            factor_of_sum = accelerator.num_processes / num_tokens(ranks)
            shares = []
            for index, batch in enumerate(ranks[accelerator.process_index]):
                is_last = index == MICRO_BATCHES - 1
                accelerator.sync_gradients = is_last
                if is_last:
                    loss = summed_loss(self.model, batch, accelerator.device) * factor_of_sum
                    accelerator.backward(loss)
                else:
                    with accelerator.no_sync(self.model) if not zero(accelerator) else torch.enable_grad():
                        loss = summed_loss(self.model, batch, accelerator.device) * factor_of_sum
                        accelerator.backward(loss)
                shares.append(loss.detach())
            accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if factor != 1.0:
                for group, rate in zip(self.optimizer.param_groups, before, strict=True):
                    group["lr"] = rate
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(accelerator.gather(torch.stack(shares).sum()[None]).mean().item())
        return losses

    def guarded(self, steps: list, guard: Guard, folder: str) -> list[Any]:
        """Train the same way through `GuardedStep`; stops where the guard says so."""
        step = GuardedStep(
            self.accelerator, self.model, self.optimizer, self.scheduler, guard=guard, output_dir=folder
        )
        outcomes = []
        for ranks in steps:
            for index, batch in enumerate(ranks[self.accelerator.process_index]):
                with step.micro_batch(is_last=index == MICRO_BATCHES - 1, row_ids=batch["ids"]):
                    loss = summed_loss(self.model, batch, self.accelerator.device)
                    step.backward(loss / num_tokens(ranks) * step.loss_factor)
            outcomes.append(step.finish())
            if outcomes[-1].action == "stop":
                break
        return outcomes

    def state(self) -> dict[str, torch.Tensor]:
        """The state that this process holds: its shards of weights and optimizer states, and the learning rate."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = _local(getattr(parameter, "ds_tensor", parameter))
        inner = self.optimizer.optimizer
        inner = getattr(inner, "optimizer", inner)  # inside DeepSpeed's wrapper
        for index, states in enumerate(inner.state.values()):
            for name, value in states.items():
                if torch.is_tensor(value):
                    found[f"state.{index}.{name}"] = _local(value)
        for index, group in enumerate(inner.param_groups):
            found[f"lr.{index}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        if self.accelerator.scaler is not None:
            found["scale"] = torch.tensor(self.accelerator.scaler.get_scale())
        if zero(self.accelerator):
            for index, group in enumerate(inner.param_groups):
                for k, master in enumerate(group["params"]):
                    found[f"master.{index}.{k}"] = _local(master)
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.clone().double().cpu()


def zero(accelerator: Accelerator) -> bool:
    return accelerator.state.deepspeed_plugin is not None


def num_tokens(ranks: list) -> int:
    return sum(batch["num_tokens"] for batches in ranks for batch in batches)


def largest_difference(accelerator: Accelerator, a: dict, b: dict) -> float:
    """The largest difference over all tensors and processes; NaN if any is not finite."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    mine = max(float((a[name] - b[name]).abs().max()) if a[name].numel() else 0.0 for name in a)
    values = accelerator.gather(torch.tensor([mine], dtype=torch.float64).to(accelerator.device)).tolist()
    return max(values) if all(map(math.isfinite, values)) else math.nan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--fp16", action="store_true")
    args = parser.parse_args()
    enable_rehearsal_if_needed()
    accelerator = Accelerator(
        mixed_precision="fp16" if args.fp16 else None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # DeepSpeed's files say auto
    )
    steps = make_steps(accelerator.num_processes)
    clean = [ranks for number, ranks in enumerate(steps, 1) if number not in POISON]
    without_nan = [ranks for number, ranks in enumerate(steps, 1) if number not in POISON or number in SPIKES]

    ordinary = Training(accelerator)
    losses = ordinary.ordinary(clean)
    expected = ordinary.state()
    report(accelerator, {"case": "ordinary", "loss": losses[-1], "first_loss": losses[0], "tensors": len(expected)})

    run = Training(accelerator)
    outcomes = run.guarded(steps, Guard(GuardSettings(**SETTINGS)), f"{args.output_dir}/skip")
    report(accelerator, _summary(accelerator, "skip", run, outcomes, expected, args.output_dir))

    run = Training(accelerator)
    lowered_from = [n for n, ranks in enumerate(without_nan, 1) if ranks in [steps[s - 1] for s in SPIKES]]
    run.ordinary(without_nan, lower_after=tuple(lowered_from))
    expected = run.state()
    run = Training(accelerator)
    guard = Guard(GuardSettings(policy="lower_lr", lr_factor=LR_FACTOR, lr_steps=LR_STEPS, **SETTINGS))
    outcomes = run.guarded(steps, guard, f"{args.output_dir}/lower_lr")
    report(accelerator, _summary(accelerator, "lower_lr", run, outcomes, expected, args.output_dir))

    run = Training(accelerator)
    before = run.state()
    outcomes = run.guarded(steps, Guard(GuardSettings(policy="stop")), f"{args.output_dir}/stop")
    report(accelerator, _summary(accelerator, "stop", run, outcomes, before, args.output_dir))
    try:
        stop_run(accelerator, outcomes[-1], program="guard_run.py")
    except SystemExit as leaving:
        Path(args.output_dir, f"status.{accelerator.process_index}").write_text(str(leaving.code))


def _summary(
    accelerator: Accelerator, case: str, run: Training, outcomes: list, expected: dict, folder: str
) -> dict[str, Any]:
    return {
        "case": case,
        "actions": {n: outcome.action for n, outcome in enumerate(outcomes, 1) if outcome.action != "stepped"},
        "loss": outcomes[-1].loss,
        "difference": largest_difference(accelerator, run.state(), expected),
        "events": [
            {**event, "loss": str(event["loss"]), "grad_norm": str(event["grad_norm"]), "micro_batches": None}
            for event in read_events(f"{folder}/{case}")
        ],
    }


def report(accelerator: Accelerator, entry: dict[str, Any]) -> None:
    if accelerator.is_main_process:
        print("REPORT " + json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
