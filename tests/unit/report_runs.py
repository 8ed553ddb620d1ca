"""Run folders for the report tests, written by the same code that writes them in a real run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.reporting.metrics_log import MetricsLog
from accel_scale.reporting.run_starts import write_end, write_start
from accel_scale.reporting.summary import write_summary
from accel_scale.training.guard.events import append_event

SETTINGS = {"learning_rate": 1e-4, "output_dir": "out", "max_length": 512, "optim": "adamw_torch_fused"}
ORIGINS = {"learning_rate": "--learning_rate", "max_length": "recipe.yaml:4"}
_GIB = 2**30


def plan_of(measured: float | None = None) -> dict[str, Any]:
    """The planner's figures for an 8B model with adapters, as a run records them."""
    memory = predict_memory(
        load_model_facts("meta-llama/Llama-3.1-8B", allow_download=False),
        TrainingSetup(method="lora", sequence_length=2048),
    )
    found = {
        "card": "RTX 4090",
        "limit_bytes": 24 * _GIB,
        "predicted": {**memory.as_dict(), "step_seconds": 0.5},
    }
    if measured is not None:
        planned = found["predicted"]["allocated_bytes"]
        compared = {"planned_bytes": planned, "interval_bytes": planned // 20, "step_seconds": 0.5, "positions": 2048}
        compared["allocated_bytes"] = round(0.99 * planned)
        measurements = {"allocated_bytes": measured * planned, "step_seconds": 0.52, "positions": 2000}
        found |= {"compared": compared, "measured": measurements}
    return found


def example(text: str, said: str, *, expected: str = "4") -> dict[str, object]:
    """One answered question, as a run records it."""
    return {"task": "sums", "question": text, "expected": expected, "predicted": said, "correct": said == expected}


def write_run(
    folder: Path,
    *,
    steps: int = 60,
    rate: float = 1e-4,
    events: int = 0,
    restarts: int = 0,
    settings: dict[str, Any] | None = None,
    questions: tuple[str, ...] = ("2 + 2 =", "1 + 3 ="),
    end: BaseException | None = None,
    finished: bool = True,
) -> Path:
    """A run on a card whose loss falls from about 3 to 1, with guard events and restarts spread over it."""
    values = {**SETTINGS, "learning_rate": rate, **(settings or {})}
    content = {
        "recipe": "sft.py", "strategy": "single", "world_size": 1, "precision": "bf16", "attention": "sdpa",
        "parameters": {"total": 8_030_000_000, "trainable": 41_900_000}, "settings": values, "origins": ORIGINS,
    }  # fmt: skip
    begun = [round(steps * at / (restarts + 1)) for at in range(restarts + 1)]
    log = MetricsLog(folder, True)
    for step in range(1, steps + 1):
        if step - 1 in begun:
            write_start(folder, step=step - 1, content={**content, "plan": plan_of()})
        noise = math.sin(step * 12.9898) * 0.08
        log.write(
            step, loss=1 + 2 * math.exp(-3 * step / steps) + noise, grad_norm=1.2 + noise + 3 / step,
            learning_rate=rate * (1 - step / steps), tokens_per_second=8000 + 500 * noise,
            step_seconds=0.52 + noise / 9, data_wait_ratio=0.01 + abs(noise) / 9, host_bytes=3 * _GIB + step * 1000,
            allocated_bytes=17 * _GIB, reserved_bytes=18 * _GIB, mean_token_accuracy=0.5 + 0.3 * step / steps,
        )  # fmt: skip
        if step % max(1, steps // 6) == 0:
            log.write(step, eval_loss=1.1 + 2 * math.exp(-3 * step / steps))
    log.close()
    for at in range(events):
        append_event(folder, {
            "step": round(steps * (at + 1) / (events + 1)), "action": "skipped", "loss": math.nan if at == 0 else 9.5,
            "grad_norm": math.nan if at == 0 else 80.0 + at, "reason": "loss is not finite" if at == 0 else "loss 9.5",
            "rows": [at, at + 100], "micro_batches": [],
        })  # fmt: skip
    if finished:
        answered = {
            when: {"accuracy": share, "num_questions": 2, "examples": [example(text, said) for text in questions]}
            for when, share, said in (("before", 0.0, "7"), ("after", 1.0, "4"))
        }
        write_summary(folder, {
            **content, "steps": steps, "tokens": 4e6, "seconds": 512.0, "tokens_per_second": 8012.0,
            "data_wait_ratio": 0.012, "peak_host_bytes": 3 * _GIB, "finished": {"goal": f"{steps} steps"},
            "peak_device_bytes": {"allocated_bytes": 17 * _GIB, "reserved_bytes": 18 * _GIB},
            "exact_match": answered, "plan": plan_of(1.03),
        })  # fmt: skip
    if end is not None or finished:
        write_end(folder, end)
    return folder
