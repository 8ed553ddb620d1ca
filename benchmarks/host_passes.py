"""Host work of a layer: operators of a forward pass, and interpreter time added by checkpointing.

    python benchmarks/host_passes.py          # a minute; writes benchmarks/results/host_passes.md

A GPU that is fast for its model waits for the host; `accel_scale/planning/cost/efficiency.py` predicts for how long,
with counts and ratios from here. The layers are Qwen2's with a hidden size of 64 and rows of 16 tokens, whose
arithmetic takes a CPU no time. Figures are per layer, from the difference that four more layers make.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BENCHMARKS = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCHMARKS))

from planner_models import as_trained  # noqa: E402

from accel_scale.planning.models.training_setup import TrainingSetup  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = BENCHMARKS / "results" / "host_passes.md"
FEW, MANY, ROUNDS = 2, 6, 40
POLICIES = ("none", "every_2", "full", "offload", "selective")
# Operators that only create a view of a tensor: no kernel, and about a third of the host's time.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "reshape", "select",
    "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts the operators that run in its block, starting from given counts.

    Attributes:
        kernels, views: Numbers of operators that compute and that create a view.
    """

    def __init__(self, kernels: float = 0, views: float = 0) -> None:
        super().__init__()
        self.kernels, self.views = kernels, views

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ in VIEWS:
            self.views += 1
        else:
            self.kernels += 1
        return func(*args, **(kwargs or {}))

    @property
    def equivalents(self) -> float:
        """Number of kernels, with a view counted as a third."""
        return self.kernels + self.views / 3


def passes_of(setup: TrainingSetup, layers: int) -> Callable[[], torch.Tensor]:
    """The forward pass of a model trained as in `setup`."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=256,
    )  # fmt: skip
    is_16_bit = setup.precision == "bf16_true" or setup.trains_adapters
    dtype = torch.bfloat16 if is_16_bit else torch.float32
    model = as_trained(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa"), setup)
    tokens = torch.arange(16)[None]

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if setup.autocast else contextlib.nullcontext():
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    return forward


def kernels_of_layer(setup: TrainingSetup) -> Operators:
    """Count the operators of a layer's forward pass."""
    counts = [Operators(), Operators()]
    for layers, count in zip((FEW, MANY), counts, strict=True):
        forward = passes_of(setup, layers)
        forward()
        with count:
            forward()
    few, many = counts
    added = MANY - FEW
    return Operators((many.kernels - few.kernels) / added, (many.views - few.views) / added)


def seconds_of_layer(setup: TrainingSetup) -> dict[str, float]:
    """Seconds of a layer's passes by policy: models take turns; medians over rounds of the time four layers add."""
    models = {
        policy: [passes_of(replace(setup, checkpointing=policy), layers) for layers in (FEW, MANY)]
        for policy in POLICIES
    }
    added: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(ROUNDS):
        for policy, pair in models.items():
            few, many = (_seconds(forward) for forward in pair)
            added[policy].append((many - few) / (MANY - FEW))
    return {policy: statistics.median(found) for policy, found in added.items()}


def _seconds(forward: Callable[[], torch.Tensor]) -> float:
    started = time.process_time()
    forward().backward()
    return time.process_time() - started


def main() -> int:
    """Measure, print and write the results."""
    torch.set_num_threads(1)
    lines = [
        "# The host's share of a layer",
        "",
        "Made by `python benchmarks/host_passes.py`, whose first lines say how. A view counts as a third of a kernel.",
        "Passes are times over that of `none`, which counts as three: forward, and two for backward.",
        "",
        f"| method, precision | kernels | views | together | {' | '.join(POLICIES)} |",
        f"|---|---:|---:|---:|{'---:|' * len(POLICIES)}",
    ]
    for method in ("full", "lora"):
        for precision in ("bf16_true", "bf16"):
            setup = TrainingSetup(method=method, precision=precision, checkpointing="none")
            count, seconds = kernels_of_layer(setup), seconds_of_layer(setup)
            passes = [3 * found / seconds["none"] for found in seconds.values()]
            counted = f"{count.kernels:.0f} | {count.views:.0f} | {count.equivalents:.0f}"
            lines.append(f"| {method}, {precision} | {counted} | {' | '.join(f'{value:.1f}' for value in passes)} |")
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
