"""Compare the planner's peak memory with whole training steps measured on a CPU, over random small models.

    python benchmarks/planner_measure.py                      # 120 configurations, printed per architecture
    python benchmarks/planner_measure.py --num 16 --seed 3    # fewer, others
    python benchmarks/planner_measure.py --results benchmarks/results/planner_cpu

Each configuration draws an architecture, its shape, method, precision, checkpointing policy, attention, loss,
optimizer and batch from its own seed, creates the optimizer states and measures a step: forward, backward, clipping
and update. torch's MemTracker (for adapters this project's tracker) counts every tensor, including weights and states.
Errors are relative to the measured peak. The share of activations in the peak is printed too, since weights alone
would be easy.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from planner_models import ARCHITECTURES, build_model, draw_config, draw_inputs, draw_setup

from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.optimizers import create_optimizer
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.reporting.summary import installed_versions
from accel_scale.verifying.measured_memory import StorageTracker, resident_tensors


@dataclass(frozen=True)
class Measured:
    """One configuration with its predicted and measured bytes."""

    seed: int
    architecture: str
    method: str
    precision: str
    checkpointing: str
    attention: str
    loss: str
    optimizer: str
    packing: bool
    dora: bool
    micro_batch_size: int
    sequence_length: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    measured_bytes: int
    predicted_bytes: int
    activation_share: float

    @property
    def error(self) -> float:
        """Signed error relative to the measured value."""
        return self.predicted_bytes / self.measured_bytes - 1


def peak_bytes(model: Any, setup: TrainingSetup, inputs: dict[str, torch.Tensor]) -> int:
    """Peak bytes in tensors during a step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = create_optimizer(setup.optimizer, parameters, lr=1e-4)
    extra = {"fast_lm_head": True} if setup.loss == "chunked" else {}

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if setup.autocast else nullcontext():
            loss = model(**inputs, use_cache=False, **extra).loss
        loss.backward()
        del loss
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    # MemTracker hooks every layer's inputs and fails if they need no gradient, as in frozen layers.
    peak = _mem_tracker_peak(step, model, optimizer) if setup.method == "full" else None
    return _own_peak(step, model, optimizer) if peak is None else peak


def _mem_tracker_peak(step: Any, model: Any, optimizer: Any) -> int | None:
    """Peak by torch's MemTracker, a private module (torch 2.13); None if its interface has changed."""
    known = {id(parameter) for parameter in model.parameters()}
    try:
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(model, optimizer, *(t for t in resident_tensors(model) if id(t) not in known))
        with tracker:
            step()
        return sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
    except (ImportError, AttributeError, TypeError):
        optimizer.zero_grad()
        return None


def _own_peak(step: Any, model: Any, optimizer: Any) -> int:
    tracker = StorageTracker()
    with tracker:
        tracker.adopt(resident_tensors(model, optimizer))
        step()
    return tracker.peak_bytes


def measure(seed: int, architecture: str) -> Measured:
    """Measure one configuration, drawn from its seed."""
    rng = Random(seed)
    torch.manual_seed(seed)
    config, setup = draw_config(architecture, rng), draw_setup(architecture, rng)
    config._attn_implementation = register_packed_attention() if setup.packing else setup.attention
    facts = facts_from_config(config.to_dict(), name=architecture)
    prediction = predict_memory(facts, setup, is_cuda=False, is_tracked=True)
    measured = peak_bytes(build_model(config, setup), setup, draw_inputs(config, setup, rng))
    states = prediction.states.weight_bytes + prediction.states.optimizer_bytes
    return Measured(
        seed=seed,
        architecture=architecture,
        method=setup.method,
        precision=setup.precision,
        checkpointing=setup.checkpointing,
        attention=setup.attention,
        loss=setup.loss,
        optimizer=setup.optimizer,
        packing=setup.packing,
        dora=setup.lora.dora,
        micro_batch_size=setup.micro_batch_size,
        sequence_length=setup.sequence_length,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        measured_bytes=int(measured),
        predicted_bytes=round(prediction.peak_bytes),
        activation_share=1 - states / measured,
    )


def summary(rows: list[Measured]) -> list[str]:
    """Lines of a Markdown table with errors per architecture and overall."""
    lines = [
        "| architecture | rows | median error | worst error | activations, median share |",
        "|---|---|---|---|---|",
    ]
    groups = {name: [row for row in rows if row.architecture == name] for name in ARCHITECTURES}
    for name, group in [*groups.items(), ("all", rows)]:
        if group:
            median = statistics.median(abs(row.error) for row in group)
            worst = max((row.error for row in group), key=abs)
            share = statistics.median(row.activation_share for row in group)
            lines.append(f"| {name} | {len(group)} | {median:.2%} | {worst:+.2%} | {share:.0%} |")
    return lines


def write_results(stem: Path, seed: int, rows: list[Measured]) -> None:
    """Write `stem`.json with every row and `stem`.md with the summary and the worst rows."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    document = {"seed": seed, "versions": installed_versions(), "rows": [asdict(r) | {"error": r.error} for r in rows]}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    worst = sorted(rows, key=lambda row: -abs(row.error))[:8]
    lines = [
        "# The planner beside measured steps on a CPU",
        "",
        f"`python benchmarks/planner_measure.py --num {len(rows)} --seed {seed}`: peak bytes in tensors over a whole",
        "optimizer step of random small models, predicted, and counted by torch's MemTracker (for adapters by",
        "this project's tracker). Nothing was fitted to these seeds.",
        "",
        *summary(rows),
        "",
        "The largest errors:",
        "",
        "| seed | architecture | method | precision | checkpointing | attention | loss | optimizer | error |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r.seed} | {r.architecture} | {r.method}{' (DoRA)' if r.dora else ''} | {r.precision} | "
            f"{r.checkpointing} | {r.attention}{', packed' if r.packing else ''} | {r.loss} | {r.optimizer} | "
            f"{r.error:+.2%} |"
            for r in worst
        ),
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=120, help="configurations")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on")
    parser.add_argument("--results", type=Path, help="write this path with .json and .md")
    parser.add_argument("--verbose", action="store_true", help="print each configuration")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Imported modules stay alive, so later garbage collections need not scan them.
    gc.freeze()
    started, rows = time.monotonic(), []
    for index in range(arguments.num):
        row = measure(arguments.seed + index, ARCHITECTURES[index % len(ARCHITECTURES)])
        rows.append(row)
        if arguments.verbose:
            print(f"{row.error:+.2%} {row.activation_share:.0%} {row}", flush=True)
    print("\n".join(summary(rows)))
    print(f"{len(rows)} configurations in {time.monotonic() - started:.0f} s")
    if arguments.results:
        write_results(arguments.results, arguments.seed, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
