"""Pipeline stages: the layers of each, and how long they wait for each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.flops import active_linear_flops, attention_flops
from accel_scale.planning.models.model_config import facts_from_config

# Names that configurations use for the number of layers.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Tolerance for float sums taken in a different order.
_ROUNDING = 1e-9


def bubble_fraction(schedule: str, num_ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Share of a step in which a rank waits, if stages take equally long and backward takes twice as long as forward.

    With p ranks, m micro-batches and v stages per rank, a stage's forward pass f and backward pass 2f, a rank computes
    for 3·m·v·f and waits for:

    - GPipe and 1F1B: (p−1)·3f, so (p−1)/(m+p−1). Huang et al., arXiv:1811.06965; Narayanan et al., arXiv:2104.04473.
    - interleaved: the same with stages 1/v as long, (p−1)/(m·v+p−1). Narayanan et al.; m is a multiple of p.
    - zero bubble: gradients of weights (f) fill the gaps left by other ranks' gradients of inputs (f). ZB-H1, which
      torch calls ZB1P, waits for (p−1)·(f+f−f): (p−1)/(3·m·v+p−1). Qi et al., arXiv:2401.10241.

    Args:
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` or ``zero_bubble``.
        num_ranks: p.
        micro_batches: m of a step.
        stages_per_rank: v.

    Raises:
        ConfigError: if it is not a schedule.
    """
    waiting = num_ranks - 1
    if schedule in ("gpipe", "1f1b", "interleaved"):
        return waiting / (micro_batches * stages_per_rank + waiting)
    if schedule == "zero_bubble":
        return waiting / (3 * micro_batches * stages_per_rank + waiting)
    raise ConfigError(
        f"{schedule!r} is not a pipeline schedule.",
        place="schedule",
        fix="use gpipe, 1f1b, interleaved or zero_bubble.",
    )


def layer_costs(config: Mapping[str, Any], sequence_length: int, *, name: str = "model") -> tuple[float, ...]:
    """Forward FLOPs per token of each layer, in order; the head's are added to the last layer.

    Backward FLOPs are twice as many in both layers and head, so they do not change a balance. The embedding look-up
    multiplies nothing: the first layer carries it for free.

    Args:
        config: The contents of a ``config.json``.
        sequence_length: Tokens per row, for attention.
        name: Name of the model in errors.

    Raises:
        ConfigError: if the architecture is not modelled.
    """
    num_layers = _num_layers(config)
    # A model cut after k layers keeps the order of layer kinds: sliding windows, dense ones before experts.
    sums = [_forward_flops(_cut(config, k, num_layers), sequence_length, name) for k in range(1, num_layers + 1)]
    costs = [after - before for before, after in itertools.pairwise([0.0, *sums])]
    facts = facts_from_config(config, name=name)
    return (*costs[:-1], costs[-1] + 2.0 * facts.vocab_size * facts.hidden_size)


def _num_layers(config: Mapping[str, Any]) -> int:
    for key in _NUM_LAYERS:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise ConfigError("the config does not say how many layers there are.", place=str(config.get("model_type")))


def _cut(config: Mapping[str, Any], layers: int, num_layers: int) -> dict[str, Any]:
    """The config cut to the first `layers` layers."""
    cut = dict(config)
    for key, value in config.items():
        if key in _NUM_LAYERS:
            cut[key] = layers
        elif isinstance(value, list) and len(value) == num_layers:
            cut[key] = value[:layers]
    return cut


def _forward_flops(config: Mapping[str, Any], sequence_length: int, name: str) -> float:
    facts = facts_from_config(config, name=name)
    linears = sum(layer.count * active_linear_flops(layer) for layer in facts.layers)
    return linears + attention_flops(facts, sequence_length)


def stage_boundaries(costs: Sequence[float], num_stages: int) -> list[range]:
    """Consecutive layers for each stage, so that the most expensive stage is as cheap as possible.

    Among those splits, one with the smallest sum of squares is chosen, so that the other stages are even too.

    Args:
        costs: Cost of each layer, in order, in any unit; not negative. What a stage does besides its layers (the head)
            is part of the nearest layer's cost.
        num_stages: Number of ranges to return; each has at least one layer.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_layers} layers cannot be divided among {num_stages} pipeline stages.",
            place="--pp_size",
            fix=f"use {num_layers} stages at most.",
        )
    sums = [0.0, *itertools.accumulate(costs)]
    largest = _fewest(sums, num_stages, max, math.inf)[0][-1]
    limit = largest * (1 + _ROUNDING)
    ends = _fewest(sums, num_stages, lambda before, cost: before + cost * cost, limit)[1]
    stages: list[range] = []
    end = num_layers
    for chosen in reversed(ends):
        stages.insert(0, range(chosen[end], end))
        end = chosen[end]
    return stages


def _fewest(sums: list[float], num_stages: int, combine: Any, limit: float) -> tuple[list[float], list[list[int]]]:
    """Dynamic programming over stages: the least value for the first n layers, and the start of the last stage.

    Args:
        sums: Sums of the first n layers' costs.
        combine: Combines the value of earlier stages with the cost of one more.
        limit: Maximum cost of a stage.
    """
    num_layers = len(sums) - 1
    best = [0.0 if n == 0 else math.inf for n in range(num_layers + 1)]
    choices: list[list[int]] = []
    for stage in range(1, num_stages + 1):
        following, begins = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage, num_layers + 1):
            for begin in range(stage - 1, end):
                cost = sums[end] - sums[begin]
                if cost > limit:
                    continue
                value = combine(best[begin], cost)
                if value < following[end]:
                    following[end], begins[end] = value, begin
        best = following
        choices.append(begins)
    return best, choices
