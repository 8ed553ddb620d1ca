"""Checkpoints that a pretraining run starts from: the trunk of a branch, or an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from accel_scale.errors import ConfigError
from accel_scale.optimization.schedules import warmup_step_count

_STABLE_SCHEDULES = ("warmup_stable_decay", "constant", "constant_with_warmup")


class ScheduleRecord(TypedDict, total=False):
    """Facts about a trunk's schedule that a branch needs; stored in every checkpoint."""

    name: str
    warmup_steps: int
    decay_begins: int


class _Named(TypedDict):
    name: str
    num_training_steps: int


class ScheduleSettings(_Named, total=False):
    """Keyword arguments of `create_schedule`."""

    warmup_steps: float
    warmup_ratio: float | None
    decay_ratio: float
    decay_shape: str
    min_lr_ratio: float | None


def schedule_record(schedule: ScheduleSettings) -> ScheduleRecord:
    """The record of a schedule for the checkpoint, needed by branches."""
    total = schedule["num_training_steps"]
    warmup = warmup_step_count(
        total, warmup_steps=schedule.get("warmup_steps", 0), warmup_ratio=schedule.get("warmup_ratio")
    )
    decay = round(schedule.get("decay_ratio", 0.0) * total) if schedule["name"] == "warmup_stable_decay" else 0
    return {"name": schedule["name"], "warmup_steps": warmup, "decay_begins": total - decay}


def trunk_step(folder: str | None, *, place: str = "--decay_from") -> int | None:
    """The step of a trunk's checkpoint; None without one.

    Raises:
        ConfigError: if it is not a checkpoint of this recipe, or not in a stable phase.
    """
    if not folder:
        return None
    from accel_scale.training.checkpoints.contents import read_state
    from accel_scale.training.checkpoints.manifest import Damaged, read_manifest

    try:
        step = read_manifest(Path(folder)).step
        record = read_state(Path(folder))["state"]["schedule"]
    except (Damaged, OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{folder} is not a checkpoint to branch off from ({error}).",
            place=place,
            fix="give the path of a checkpoint-<step> that this recipe wrote.",
        ) from None
    check_trunk(record, step, place=place)
    return step


def check_trunk(record: ScheduleRecord, step: int, *, place: str) -> None:
    """Refuse to branch off if the learning rate is not at its peak.

    Raises:
        ConfigError: for a schedule without a stable phase, or a step outside of it.
    """
    name = record.get("name")
    if name not in _STABLE_SCHEDULES:
        raise ConfigError(
            f"the trunk's schedule is {name}, which has no stable phase.",
            place=place,
            fix="train a trunk with --lr_scheduler_type wsd --decay_ratio 0.",
        )
    if not record["warmup_steps"] <= step <= record["decay_begins"]:
        raise ConfigError(
            f"step {step} is in the trunk's {'warm-up' if step < record['warmup_steps'] else 'own decay'}.",
            place=place,
            fix=f"branch off between steps {record['warmup_steps']} and {record['decay_begins']}.",
        )
