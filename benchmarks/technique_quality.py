"""`techniques.py`: losses of optimizers and adapters on the same rows, each at the better of two learning rates."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace
from typing import Any

from technique_cpu import SETUP, embedded_rows, start
from technique_rows import RUNGS, Stage, Values, Work, ladder

NUM_STEPS, HELD_OUT_ROWS = 60, 64
# The usual rate of the recipes' examples, and three times that.
RATES = {
    "full": (2e-4, 6e-4), "adamw_8bit": (2e-4, 6e-4), "adamw_4bit": (2e-4, 6e-4), "adafactor": (2e-4, 6e-4),
    "momentum": (1e-2, 3e-2), "sgd": (1e-1, 3e-1), "lora": (2e-3, 6e-3), "lora_1": (2e-3, 6e-3),
    "qlora": (2e-3, 6e-3), "qlora_1": (2e-3, 6e-3),
}  # fmt: skip


def measure(name: str) -> dict[str, Values]:
    """Loss on unseen rows after `NUM_STEPS` steps."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    batch = SETUP.micro_batch_size
    rows = embedded_rows(NUM_STEPS * batch + HELD_OUT_ROWS, SETUP.sequence_length)
    unseen, seen = rows[:HELD_OUT_ROWS], rows[HELD_OUT_ROWS:]
    changes = next(rung.changes for rung in RUNGS if rung.name == name)
    # Without checkpointing, which does not change the numbers.
    setup = replace(ladder(SETUP)["loss"], **{key: value for key, value in changes.items() if key != "checkpointing"})
    losses, before = {}, 0.0
    for rate in RATES[name]:
        loop = start(name, setup)
        for group in loop.optimizer.param_groups:
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate
        before = _loss(loop, unseen)
        for ids in seen.split(batch):
            loop.step(ids)
        losses[_loss(loop, unseen)] = rate
    best = min(losses)
    return {f"quality/{name}": {"eval_loss": best, "before": before, "learning_rate": losses[best]}}


def _loss(loop: Any, rows: Any) -> float:
    import torch

    with torch.no_grad():
        return statistics.mean(loop.loss(ids).item() for ids in rows.split(16))


STAGE = Stage(
    "quality",
    "measured",
    f"The embedded model fine-tuned for {NUM_STEPS} steps of {SETUP.micro_batch_size} rows of {SETUP.sequence_length} "
    f"tokens in fp32, the better of two learning rates; loss on {HELD_OUT_ROWS} rows that none has seen.",
    tuple(Work((f"quality/{name}",), functools.partial(measure, name)) for name in RATES),
)
