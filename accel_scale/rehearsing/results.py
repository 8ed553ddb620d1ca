"""What a rehearsed run left in its output folder: its summary, or what a transformers Trainer writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from accel_scale.recipe_specs.spec import NUM_STEPS
from accel_scale.reporting.summary import SUMMARY_NAME

_TRAINER_STATE = "trainer_state.json"
_WEIGHTS = ("adapter_config.json", "config.json")


@dataclass(frozen=True)
class RunResults:
    """Of one run.

    Attributes:
        world_size: Processes that the run knew of.
        losses: One per step, those that a checkpoint remembered first.
        verified: Tensors that the run read back from its first checkpoint and compared, and their largest difference.
    """

    world_size: int | None
    losses: list[float]
    verified: tuple[int, float] | None = None


def read_results(folder: Path) -> RunResults | None:
    """From ``run_summary.json``, else from the last checkpoint of a Trainer; None without either."""
    path = folder / SUMMARY_NAME
    if path.is_file():
        summary = json.loads(path.read_text(encoding="utf-8"))
        verified = summary.get("verified")
        return RunResults(
            summary.get("world_size"),
            summary["losses"],
            (verified["tensors"], verified["max_diff"]) if verified else None,
        )
    checkpoint = folder / f"checkpoint-{NUM_STEPS}"
    states = [path for path in (folder / _TRAINER_STATE, checkpoint / _TRAINER_STATE) if path.is_file()]
    if not states:
        return None
    history = json.loads(states[0].read_text(encoding="utf-8"))["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    # Every rank of a Trainer writes its random states, under its number where there are several.
    ranks = len(list(checkpoint.glob("rng_state*.pth")))
    return RunResults(ranks or None, losses)


def final_folder(folder: Path) -> Path:
    """Where the trained model is: the output folder, or the last checkpoint of a script that saves no more."""
    has_model = any((folder / name).is_file() for name in _WEIGHTS)
    return folder if has_model else folder / f"checkpoint-{NUM_STEPS}"
