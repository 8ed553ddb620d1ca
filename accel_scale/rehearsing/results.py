"""Reads the results of a rehearsed run from its output folder: its summary or a transformers Trainer's files."""

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
    """Results of one run.

    Attributes:
        world_size: Number of processes that the run saw.
        losses: One per step, starting with those stored in a checkpoint.
        verified: Number of tensors read back from the first checkpoint and compared, and their largest difference.
    """

    world_size: int | None
    losses: list[float]
    verified: tuple[int, float] | None = None


def read_results(folder: Path) -> RunResults | None:
    """Read ``run_summary.json``, else the last checkpoint of a Trainer; None without either."""
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
    # Every rank of a Trainer saves its RNG state, named by rank if there are several.
    ranks = len(list(checkpoint.glob("rng_state*.pth")))
    return RunResults(ranks or None, losses)


def final_folder(folder: Path) -> Path:
    """Folder of the trained model: the output folder, or the last checkpoint if the script saves nothing else."""
    has_model = any((folder / name).is_file() for name in _WEIGHTS)
    return folder if has_model else folder / f"checkpoint-{NUM_STEPS}"
