"""What torch's CUDA allocator holds after steps of rows of one length, simulated, next to what is planned.

    python benchmarks/allocator_steps.py          # two minutes; writes benchmarks/results/allocator_steps.md

Weights, three steps on the planner's tape, gradients and optimizer states are served by `CachingAllocator`, for a
random draw of models and settings on one GPU. Least squares on the runs with LoRA give the shares `_HELD_WHOLE` and
`_HELD_IN_CHUNKS` of accel_scale/planning/cost/overheads.py. Other runs are planned with them; where all weights are
trained, with the rule for states that are made after the first backward pass, too.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from caching_allocator import CachingAllocator, Graph, served_by

from accel_scale.planning.cost.memory import MemoryEstimate, predict_memory
from accel_scale.planning.cost.overheads import takes_whole_logits
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_facts import LinearFacts, ModelFacts
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup

RESULTS = Path(__file__).resolve().parent / "results" / "allocator_steps.md"
MODELS = (
    "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-4B", "google/gemma-2-2b",
    "HuggingFaceTB/SmolLM2-1.7B", "microsoft/Phi-3-mini-4k-instruct", "Qwen/Qwen2.5-0.5B",
)  # fmt: skip
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "lora"}, {"method": "qlora"}, {"method": "full"}, {"method": "full", "precision": "bf16_true"},
    {"method": "full", "weight_dtype": "bfloat16", "optimizer": "adamw_torch"},
)  # fmt: skip
ROWS = ((1, 512), (1, 2048), (4, 4096), (16, 1024), (1, 16384))
RUNS, STEPS = 450, 3
LORA = LoraSetup(16, ("all-linear",))
# Constants of a 4-bit block of 64 values, one byte each.
_BLOCK = 64


@dataclass(frozen=True)
class Run:
    """One setting: bytes reserved and in tensors at the peak, simulated, and the plan."""

    model: str
    setup: TrainingSetup
    reserved: int
    peak: int
    plan: MemoryEstimate
    is_whole: bool

    @property
    def error(self) -> float:
        """Of the planned reserved bytes."""
        return self.plan.reserved_bytes / self.reserved - 1

    @property
    def error_without(self) -> float:
        """The same without blocks that nothing fits."""
        return (self.plan.reserved_bytes - self.plan.hoarded_bytes) / self.reserved - 1

    @property
    def marks(self) -> list[float]:
        """What the shares multiply."""
        step = self.plan.step
        head, last = step.loss_bytes - step.forward_bytes, step.backward_top_bytes - step.forward_bytes
        return [max(0.0, head), max(0.0, last), step.forward_bytes - step.saved_bytes]


def linears(model: ModelFacts) -> Iterator[LinearFacts]:
    """Every matrix of every layer."""
    for layer in model.each_layer():
        for linear in layer.linears:
            yield from itertools.repeat(linear, linear.copies)


def weights(model: ModelFacts, setup: TrainingSetup) -> Iterator[float]:
    """Bytes of the model's weights, tensor by tensor."""
    itemsize = setup.trained_bytes if setup.trains_all else setup.frozen_bytes
    for linear in linears(model):
        numel = linear.in_features * linear.out_features
        if setup.quantises_base and linear.quantisable:
            yield numel / 2
            yield numel / _BLOCK
        else:
            yield numel * itemsize
    yield from (model.hidden_size * itemsize for layer in model.each_layer() for _ in range(layer.num_norms))
    yield model.embedding_params * itemsize
    if model.head_params:
        yield model.head_params * itemsize


def trained(model: ModelFacts, setup: TrainingSetup) -> list[float]:
    """Bytes of the tensors that are trained."""
    if setup.trains_all:
        return list(weights(model, setup))
    sizes = ((linear.in_features, linear.out_features) for linear in linears(model))
    return [size * setup.lora.rank * setup.trained_bytes for pair in sizes for size in pair]


def simulate(model: ModelFacts, setup: TrainingSetup) -> CachingAllocator:
    """The allocator after a few steps with AdamW, whose states the first of them makes."""
    allocator = CachingAllocator()
    for size in weights(model, setup):
        allocator.allocate(size)
    tensors = trained(model, setup)
    if not setup.trains_all:
        for size in tensors:
            allocator.allocate(size)
    for step in range(STEPS):
        with served_by(allocator):
            graph = Graph(model, setup)  # holds the gradients
            for size in tensors if step == 0 else ():
                allocator.allocate(size)
                allocator.allocate(size)
            if setup.optimizer == "adamw_torch":
                for block in [allocator.allocate(size) for size in tensors]:
                    allocator.free(block)
            del graph
    return allocator


def run(asked: tuple[str, dict[str, Any]]) -> Run:
    """Simulate and plan one setting."""
    name, fields = asked
    model, setup = load_model_facts(name, allow_download=False), TrainingSetup(**fields)
    allocator = simulate(model, setup)
    whole = takes_whole_logits(setup, model.vocab_size)
    return Run(name, setup, allocator.reserved, allocator.peak, predict_memory(model, setup), whole)


def drawn() -> list[tuple[str, dict[str, Any]]]:
    """A random draw of all combinations."""
    policies, losses = ("full", "none", "selective"), ("full", "chunked")
    found = []
    for name, method, policy, loss, (rows, length) in itertools.product(MODELS, METHODS, policies, losses, ROWS):
        fields = {**method, "checkpointing": policy, "loss": loss, "attention": "flash_attention_2", "lora": LORA}
        found.append((name, {**fields, "micro_batch_size": rows, "sequence_length": length}))
    return random.Random(0).sample(found, RUNS)


def fitted(runs: Sequence[Run]) -> list[float]:
    """Shares of the marks that explain what is reserved beyond tensors, by least squares of relative errors."""
    marks = torch.tensor([[mark / run.peak for mark in run.marks] for run in runs], dtype=torch.float64)
    held = torch.tensor([run.reserved / run.peak - 1 for run in runs], dtype=torch.float64)
    return torch.linalg.lstsq(marks, held[:, None]).solution[:, 0].tolist()


def main() -> int:
    """Simulate, compare, print and write the results."""
    with ProcessPoolExecutor(2) as pool:
        runs = list(pool.map(run, drawn(), chunksize=8))
    lines = [
        "# Memory that the allocator holds after steps of one length",
        "",
        "Made by `python benchmarks/allocator_steps.py`, whose first lines say how.",
        "",
        "| method | loss | runs | reserved beyond tensors, median | error of plans, median | 90th percentile | bias "
        "| without held blocks: median | bias |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for method, is_whole in itertools.product(("lora", "qlora", "full"), (True, False)):
        some = [run for run in runs if (run.setup.method, run.is_whole) == (method, is_whole)]
        errors = sorted(abs(run.error) for run in some)
        beyond = statistics.median(run.reserved / run.peak - 1 for run in some)
        figures = [beyond, statistics.median(errors), errors[int(0.9 * len(errors))]]
        signed = statistics.median(run.error for run in some)
        without = [run.error_without for run in some]
        cells = [*(f"{value:.1%}" for value in figures), f"{signed:+.1%}"]
        cells += [f"{statistics.median(map(abs, without)):.1%}", f"{statistics.median(without):+.1%}"]
        loss = "whole logits" if is_whole else "in chunks"
        lines.append(f"| {method} | {loss} | {len(some)} | {' | '.join(cells)} |")
    lines += ["", "Fitted shares of what head and loss allocate, of what the last layer's backward pass adds to the "]
    lines[-1] += "forward pass, and of what layers allocate besides what is saved:"
    adapters = [run for run in runs if run.setup.method == "lora"]
    for is_whole in (True, False):
        shares = fitted([run for run in adapters if run.is_whole == is_whole])
        name = "whole logits" if is_whole else "logits in chunks"
        lines += ["", f"- {name}: {', '.join(f'{share:.2f}' for share in shares)}"]
    text = "\n".join(lines) + "\n"
    RESULTS.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
