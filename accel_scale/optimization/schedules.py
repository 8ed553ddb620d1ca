"""Learning rate schedules by ratios: cosine and linear with a floor, warm-up–stable–decay, constant.

Names are those of transformers' `--lr_scheduler_type`; `wsd` is short for `warmup_stable_decay`. Schedules not
implemented here are built by transformers' `get_scheduler` unchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.names import DECAYING_SCHEDULES, OWN_SCHEDULES, SCHEDULE_ALIASES, SCHEDULE_NAMES

if TYPE_CHECKING:
    import torch

# The only schedules of transformers that accept a floor as a ratio, under this keyword.
_FLOOR_KEYWORD = {"cosine_with_min_lr": "min_lr_rate", "cosine_warmup_with_min_lr": "min_lr_rate"}
_PLACE = "--lr_scheduler_type"


def schedule_name(name: object) -> str:
    """The transformers name of a schedule given by name, alias or `SchedulerType`."""
    text = str(getattr(name, "value", name))
    return SCHEDULE_ALIASES.get(text, text)


def decay_factor(progress: float, shape: str) -> float:
    """Share of the peak left after `progress` ∈ [0, 1] of a decay: 1 at 0, 0 at 1, never rising.

    ``1-sqrt`` is the decay of Hägele et al. 2024 (arXiv:2405.18392, section 3); ``linear`` and ``cosine`` are the
    usual ones.
    """
    progress = min(1.0, max(0.0, progress))
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(progress)
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ConfigError(
        f"{shape!r} is not a shape of decay.", place="--decay_shape", fix="use 1-sqrt, linear or cosine."
    )


def lr_factor(
    step: int,
    *,
    name: str,
    num_training_steps: int,
    num_warmup_steps: int = 0,
    num_decay_steps: int = 0,
    decay_shape: str = "1-sqrt",
    min_lr_ratio: float = 0.0,
) -> float:
    """Learning rate of optimizer step `step` (counted from 0) as a share of the peak.

    Warm-up is ``(step + 1) / num_warmup_steps``: no step is spent at a learning rate of zero, unlike
    transformers' own schedules, whose first step does nothing. The decay reaches `min_lr_ratio` at ``step ==
    num_training_steps``, one past the last step taken, for the same reason. Only `warmup_stable_decay` reads
    `num_decay_steps` and `decay_shape`.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if name in ("constant", "constant_with_warmup"):
        return 1.0
    if name == "warmup_stable_decay":
        decay_start, shape = max(num_warmup_steps, num_training_steps - num_decay_steps), decay_shape
    elif name in ("cosine", "linear"):
        decay_start, shape = num_warmup_steps, name
    else:
        raise ConfigError(f"{name!r} has no closed form here.", place=_PLACE, fix=f"use one of {OWN_SCHEDULES}.")
    progress = (step - decay_start) / max(1, num_training_steps - decay_start)
    return min_lr_ratio + (1.0 - min_lr_ratio) * decay_factor(progress, shape)


def warmup_step_count(num_training_steps: int, *, warmup_steps: float = 0, warmup_ratio: float | None = None) -> int:
    """Number of warm-up steps, from a share of the run or a number of steps.

    As in transformers, `warmup_steps` below 1 is a share too.

    Raises:
        ConfigError: if both are given, or the ratio is outside [0, 1].
    """
    if warmup_ratio is not None and warmup_steps:
        raise ConfigError(
            f"--warmup_ratio {warmup_ratio:g} and --warmup_steps {warmup_steps:g} both set the warm-up.",
            place="--warmup_ratio",
            fix="remove one of them.",
        )
    _check_ratio(warmup_ratio, "--warmup_ratio")
    if warmup_steps < 0:
        raise ConfigError(
            f"{warmup_steps:g} warm-up steps are negative.", place="--warmup_steps", fix="use 0 or more."
        )
    ratio = warmup_ratio if warmup_ratio is not None else (warmup_steps if warmup_steps < 1 else None)
    # Rounded first: 0.07 * 100 is a little more than 7 in floating point.
    return int(warmup_steps) if ratio is None else math.ceil(round(ratio * num_training_steps, 9))


def create_schedule(
    optimizer: torch.optim.Optimizer,
    name: object,
    *,
    num_training_steps: int,
    warmup_steps: float = 0,
    warmup_ratio: float | None = None,
    min_lr_ratio: float | None = None,
    decay_ratio: float = 0.1,
    decay_shape: str = "1-sqrt",
    scheduler_kwargs: dict[str, Any] | None = None,
) -> torch.optim.lr_scheduler.LRScheduler:
    """Create a schedule stepped once per optimizer step; its state is plain numbers, so it resumes without pickle.

    The run's length is not part of the state: a run resumed with another `num_training_steps` follows the new length.

    Args:
        name: A value of transformers' `SchedulerType`, or ``wsd``.
        min_lr_ratio: Floor as a share of the peak; `None` means zero.
        scheduler_kwargs: `--lr_scheduler_kwargs`, for schedules that transformers builds.

    Raises:
        ConfigError: if a setting does not apply to the schedule or two settings contradict each other.
    """
    name = schedule_name(name)
    num_warmup_steps = warmup_step_count(num_training_steps, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)
    _check_ratio(min_lr_ratio, "--min_lr_ratio")
    if name not in OWN_SCHEDULES:
        kwargs = _with_floor(name, dict(scheduler_kwargs or {}), min_lr_ratio)
        return _transformers_schedule(optimizer, name, num_warmup_steps, num_training_steps, kwargs)
    if scheduler_kwargs:
        raise ConfigError(
            f"{name} takes no --lr_scheduler_kwargs: {', '.join(scheduler_kwargs)}.",
            place="--lr_scheduler_kwargs",
            fix="use --min_lr_ratio, --decay_ratio and --decay_shape.",
        )
    if min_lr_ratio and name not in DECAYING_SCHEDULES:
        raise ConfigError(
            f"--min_lr_ratio {min_lr_ratio:g} does not apply to a {name} learning rate.",
            place="--min_lr_ratio",
            fix="remove it or use --lr_scheduler_type cosine, linear or warmup_stable_decay.",
        )
    if name == "constant" and num_warmup_steps:
        raise ConfigError(
            f"{num_warmup_steps} warm-up steps do not apply to a constant learning rate.",
            place=_PLACE,
            fix="use --lr_scheduler_type constant_with_warmup.",
        )
    factor = functools.partial(
        lr_factor,
        name=name,
        num_training_steps=num_training_steps,
        num_warmup_steps=num_warmup_steps,
        num_decay_steps=_decay_step_count(name, num_training_steps, warmup_steps, warmup_ratio, decay_ratio),
        decay_shape=decay_shape,
        min_lr_ratio=min_lr_ratio or 0.0,
    )
    if name == "warmup_stable_decay":
        decay_factor(0.0, decay_shape)  # refuses an unknown shape now rather than at the first step of the decay
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, factor)


def scaled_learning_rate(lr: float, *, global_batch_size: int, base_batch_size: int, rule: str | None) -> float:
    """Scale `lr` to another global batch: by the ratio of batch sizes (``linear``) or its root (``sqrt``).

    Linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD. Square root: Malladi et al. 2022 (arXiv:2205.10287), for
    Adam and similar optimizers.
    """
    if rule is None:
        return lr
    ratio = global_batch_size / base_batch_size
    if rule == "linear":
        return lr * ratio
    if rule == "sqrt":
        return lr * math.sqrt(ratio)
    raise ConfigError(
        f"{rule!r} is not a scaling rule.", place="--scale_lr_from_batch_size", fix="use linear or sqrt."
    )


def scaling_advice(values: Mapping[str, Any], *, is_set: Callable[[str], bool], global_batch_size: int) -> str | None:
    """Advice about a learning rate that is raised with the batch but not warmed up; None otherwise.

    Args:
        values: Flags of a recipe, whose default is to warm up unless the schedule is constant.
        is_set: Tells if a flag was set, by the user or a preset.
    """
    ratio = global_batch_size / values.get("lr_base_batch_size", 32)
    if not values.get("scale_lr_from_batch_size") or ratio <= 1:
        return None
    share, steps = values.get("warmup_ratio"), values.get("warmup_steps")
    is_constant = schedule_name(values.get("lr_scheduler_type", "")) == "constant"
    starts_cold = share == 0 or (share is None and not steps and is_set("warmup_steps"))
    if not is_constant and not starts_cold:
        return None
    schedule = " --lr_scheduler_type constant_with_warmup" if is_constant else ""
    return (
        f"the learning rate is raised for a batch {ratio:g} times as large, and its first steps are not warmed up: "
        f"runs diverge there. Fix:{schedule} --warmup_ratio 0.03."
    )


def _check_ratio(ratio: float | None, flag: str) -> None:
    if ratio is not None and not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"{ratio:g} is not a share of the whole.", place=flag, fix="use a number from 0 to 1.")


def _decay_step_count(
    name: str, num_training_steps: int, warmup_steps: float, warmup_ratio: float | None, decay_ratio: float
) -> int:
    if name != "warmup_stable_decay":
        return 0
    _check_ratio(decay_ratio, "--decay_ratio")
    # By shares, not by steps: each is rounded up, so in a short run they may meet in one step.
    share = warmup_ratio if warmup_ratio is not None else warmup_steps
    share = share if share < 1 else share / max(1, num_training_steps)
    if decay_ratio and share + decay_ratio > 1.0 + 1e-9:
        flag = "--warmup_steps" if warmup_ratio is None else "--warmup_ratio"
        raise ConfigError(
            f"{flag} {warmup_ratio or warmup_steps:g} and --decay_ratio {decay_ratio:g} add up to more than the run "
            f"of {num_training_steps:,} steps.",
            place="--decay_ratio",
            fix=f"use --decay_ratio {max(0.0, 1 - share):g} or less, or a shorter warm-up.",
        )
    return math.ceil(round(decay_ratio * num_training_steps, 9))


def _with_floor(name: str, kwargs: dict[str, Any], min_lr_ratio: float | None) -> dict[str, Any]:
    if min_lr_ratio is None:
        return kwargs
    keyword = _FLOOR_KEYWORD.get(name)
    if keyword is None or keyword in kwargs or "min_lr" in kwargs:
        reason = "has no floor" if keyword is None else "has its floor in --lr_scheduler_kwargs already"
        raise ConfigError(
            f"--min_lr_ratio {min_lr_ratio:g} cannot be applied: {name} {reason}.",
            place="--min_lr_ratio",
            fix="remove it or use --lr_scheduler_type cosine.",
        )
    return {**kwargs, keyword: min_lr_ratio}


def _transformers_schedule(
    optimizer: torch.optim.Optimizer,
    name: str,
    num_warmup_steps: int,
    num_training_steps: int,
    kwargs: dict[str, Any],
) -> Any:
    from transformers import get_scheduler

    if name not in SCHEDULE_NAMES:
        names = ", ".join(sorted(SCHEDULE_NAMES))
        raise ConfigError(f"{name!r} is not a schedule.", place=_PLACE, fix=f"use one of {names}.")
    return get_scheduler(
        name,
        optimizer=optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=kwargs or None,
    )
