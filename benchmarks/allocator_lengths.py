"""What torch's CUDA allocator keeps from rows of other lengths: its rules, played over the tensors of training steps.

    python benchmarks/allocator_lengths.py          # five minutes; writes benchmarks/results/allocator_lengths.md

The planner's tape allocates and frees what a step does; here `CachingAllocator` serves it. *share* is what it reserves
beyond the tensors at the end of the forward pass, as a multiple of what head and loss allocate; `hoarded_share` in
accel_scale/planning/cost/overheads.py predicts it. The second table compares plans with measurements of ms-swift,
whose rows differ in length (docs/source_en/LLM/Benchmark.md of modelscope/ms-swift, `max_memory_reserved` on an A100).
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from caching_allocator import GIB, CachingAllocator, Graph, served_by

from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.planning.tape.activations import step_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "allocator_lengths.md"
CARD_GIB = 79.2  # an A100
MODELS = ("Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1")
LAYERS, MICRO_BATCHES, SEEDS = 4, 200, 3
ROWS = TrainingSetup(
    method="lora", lora=LoraSetup(rank=8, targets=("c_attn",)), loss="full", attention="flash_attention_2",
    accumulation=16, sequence_length=2048, packing=False,
)  # fmt: skip
FULL: dict[str, Any] = {"method": "full", "weight_dtype": "bfloat16", "optimizer": "adamw_torch"}
_ALL = LoraSetup(rank=8, targets=("c_attn", "c_proj", "w1", "w2"))
# Model, settings that differ from `ROWS`, and GiB with rows of at most so many tokens.
SWIFT: tuple[tuple[str, dict[str, Any], dict[int, float]], ...] = (
    ("Qwen-1_8B", {}, {512: 6.99, 1024: 10.71, 2048: 16.35, 4096: 23.80, 8192: 37.03}),
    ("Qwen-7B", {}, {512: 18.01, 1024: 21.73, 2048: 27.74, 4096: 35.31, 8192: 48.41}),
    ("Qwen-14B", {}, {512: 30.14, 1024: 34.43, 2048: 40.14, 4096: 47.95, 8192: 60.74}),
    ("Qwen-7B", {"micro_batch_size": 2}, {2048: 43.11}),
    ("Qwen-7B", {"micro_batch_size": 4}, {2048: 63.81}),
    ("Qwen-7B", {"micro_batch_size": 8}, {2048: 76.14}),
    ("Qwen-7B", {"checkpointing": "none"}, {2048: 37.70}),
    ("Qwen-7B", {"attention": "eager"}, {2048: 27.71}),
    ("Qwen-7B", {"attention": "eager", "checkpointing": "none"}, {2048: 57.67}),
    ("Qwen-7B", {"lora": replace(ROWS.lora, rank=2)}, {2048: 27.72}),
    ("Qwen-7B", {"lora": replace(ROWS.lora, rank=64)}, {2048: 27.85}),
    ("Qwen-7B", {"lora": _ALL}, {2048: 27.87}),
    ("Qwen-7B", {"method": "qlora"}, {2048: 23.85}),
    ("Qwen-14B", {"method": "qlora"}, {2048: 30.05}),
    ("Qwen-1_8B", FULL, {512: 18.16, 1024: 18.62, 2048: 35.11, 4096: 31.62, 8192: 38.93}),
    ("Qwen-7B", FULL, {512: 73.37, 1024: 73.64, 2048: 74.26, 4096: 78.76}),
)


def reserved_after(model: ModelFacts, setup: TrainingSetup, lengths: Sequence[int]) -> int:
    """Bytes reserved after micro-batches of these lengths, each of which frees its gradients."""
    allocator = CachingAllocator()
    for length in lengths:
        with served_by(allocator):
            Graph(model, replace(setup, sequence_length=length))
    return allocator.reserved


def drawn(kind: str, longest: int, seed: int) -> list[int]:
    """Lengths of micro-batches: ``fixed``, ``uniform`` from a tenth, ``lognormal`` around a third of the longest."""
    random_numbers = random.Random(seed)
    draw: Callable[[], float] = {
        "fixed": lambda: longest,
        "uniform": lambda: longest * random_numbers.uniform(0.1, 1),
        "lognormal": lambda: random_numbers.lognormvariate(math.log(0.35 * longest), 0.6),
    }[kind]
    return [min(longest, max(16, int(draw()))) for _ in range(MICRO_BATCHES)]


def share_of(model: ModelFacts, setup: TrainingSetup, kind: str) -> list[float]:
    """The shares of a few runs: (reserved - tensors after the forward pass) / (tensors of head and loss)."""
    step = step_bytes(model, setup)
    blocks = step.loss_bytes - step.forward_bytes
    runs = [drawn(kind, setup.sequence_length, seed) for seed in range(1 if kind == "fixed" else SEEDS)]
    return [(reserved_after(model, setup, lengths) - step.loss_bytes) / blocks for lengths in runs]


def simulated() -> list[str]:
    """Rows of the first table."""
    lines = []
    for name in MODELS:
        whole = load_model_facts(name, allow_download=False)
        model = replace(whole, layers=(replace(whole.layers[0], count=LAYERS),))
        for method, policy, loss in (
            ("lora", "full", "full"), ("lora", "none", "full"), ("lora", "full", "chunked"), ("full", "full", "full"),
        ):  # fmt: skip
            setup = TrainingSetup(method=method, checkpointing=policy, loss=loss, attention="flash_attention_2")
            for longest in (1024, 4096):
                asked = replace(setup, sequence_length=longest)
                found = {kind: share_of(model, asked, kind) for kind in ("fixed", "uniform", "lognormal")}
                shares = (f"{statistics.mean(values):.1f}" for values in found.values())
                lines.append(f"| {name} | {method} | {policy} | {loss} | {longest:,} | {' | '.join(shares)} |")
                print(lines[-1], flush=True)
    return lines


def measured() -> tuple[list[str], str]:
    """Rows of the second table, and their errors in a sentence."""
    lines, errors, alone, shares, num_inside = [], [], [], [], 0
    for name, changes, gibs in SWIFT:
        model = load_model_facts(f"Qwen/{name}", allow_download=False)
        for longest, gib in gibs.items():
            setup = replace(ROWS, **changes, sequence_length=longest, mean_length=longest / 2)
            found = predict_memory(model, setup, limit_bytes=CARD_GIB * GIB)
            reserved, half = found.reserved_bytes / GIB, found.half_bytes / GIB
            without = reserved - found.hoarded_bytes / GIB
            (loss,) = (phase.total_bytes / GIB for phase in found.phases if phase.name == "forward and loss")
            share = (gib - loss) / ((found.step.loss_bytes - found.step.forward_bytes) / GIB)
            errors.append(abs(reserved / gib - 1))
            alone.append(abs(without / gib - 1))
            num_inside += abs(reserved - gib) <= half
            if not changes:
                shares.append(share)
            what = ", ".join(f"{key} {value}" for key, value in _named(changes).items())
            cells = (name, what, f"{longest:,}", f"{gib:.1f}", f"{share:.1f}", f"{without:.1f}")
            lines.append(f"| {' | '.join(cells)} | {reserved:.1f} ± {half:.1f} |")
    said = (
        f"{len(errors)} measurements, GiB reserved: median error {statistics.median(errors):.0%}, planned as rows of "
        f"one length {statistics.median(alone):.0%}; {num_inside} inside the interval. Measured shares of the first "
        f"{len(shares)}: {min(shares):.1f} to {max(shares):.1f}."
    )
    return lines, said


def _named(changes: dict[str, Any]) -> dict[str, object]:
    """Changes as they read in the table; a full run's dtype and optimizer are those of every full run."""
    if changes is FULL:
        return {"method": "full"}
    adapter = changes.get("lora")
    return changes if adapter is None else {"rank": adapter.rank, "of": "/".join(adapter.targets)}


def main() -> int:
    """Simulate, compare, print and write the results."""
    rows, (published, said) = simulated(), measured()
    lines = [
        "# Memory kept from rows of other lengths",
        "",
        "Made by `python benchmarks/allocator_lengths.py`, whose first lines say how.",
        "",
        f"Shares after {MICRO_BATCHES} micro-batches of {LAYERS} layers; mean of {SEEDS} runs.",
        "",
        "| model | method | checkpointing | loss | longest row | one length | uniform | lognormal |",
        "|---|---|---|---|---:|---:|---:|---:|",
        *rows,
        "",
        "## Measured by ms-swift",
        "",
        f"LoRA of rank 8 on c_attn, every layer checkpointed, one row at a time, where nothing else is said. {said}",
        "",
        "| model | settings | longest row | measured | share | planned as rows of one length | as rows that differ |",
        "|---|---|---:|---:|---:|---:|---:|",
        *published,
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
