"""One rank's share of a model under tensor and pipeline parallelism, and the micro-batches in flight on it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from accel_scale.planning.cost.flops import active_linear_flops, attention_flops
from accel_scale.planning.cost.pipeline import stage_boundaries
from accel_scale.planning.models.model_facts import LayerFacts, ModelFacts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.tape.parallel import tensor_parallel_share


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a model.

    Attributes:
        facts: The layers, embedding and head that it holds, divided among tensor-parallel ranks.
        waiting: Maximum number of micro-batches whose activations it keeps besides the current one's.
        num_received: Number of its stages that get hidden states from others, plus those that get gradients of them.
    """

    facts: ModelFacts
    waiting: float = 0.0
    num_received: int = 0


def rank_shares(model: ModelFacts, setup: TrainingSetup) -> tuple[RankShare, ...]:
    """The ranks of a pipeline that can be the fullest; a single share without a pipeline.

    Among ranks that hold the same kinds of layers, the first keeps the most activations.
    """
    parallel = setup.parallel
    if parallel.pipeline_parallel == 1:
        return (RankShare(tensor_parallel_share(model, parallel.tensor_parallel)),)
    return _rank_shares(model, setup.sequence_length, setup.accumulation, _pipeline_only(parallel))


def _pipeline_only(parallel: ParallelSetup) -> ParallelSetup:
    """The settings that shares depend on, so that they are computed once for many setups."""
    return ParallelSetup(
        tensor_parallel=parallel.tensor_parallel,
        pipeline_parallel=parallel.pipeline_parallel,
        pipeline_schedule=parallel.pipeline_schedule,
        stages_per_rank=parallel.stages_per_rank,
    )


@functools.lru_cache(maxsize=1024)
def _rank_shares(
    model: ModelFacts, sequence_length: int, accumulation: int, parallel: ParallelSetup
) -> tuple[RankShare, ...]:
    ranks = parallel.pipeline_parallel
    stages = stage_layers(model, sequence_length, ranks * parallel.stages_per_rank)
    last = len(stages) - 1
    found: dict[ModelFacts, RankShare] = {}
    for rank in range(ranks):
        held = range(rank, len(stages), ranks)
        layers = _counted(model, (kind for stage in held for kind in stages[stage]))
        part = _part(model, layers, is_first=0 in held, is_last=last in held)
        facts = tensor_parallel_share(part, parallel.tensor_parallel)
        waiting = micro_batches_in_flight(parallel, rank, accumulation) - 1
        received = 2 * len(held) - (0 in held) - (last in held)
        found.setdefault(facts, RankShare(facts, waiting, received))
    return tuple(found.values())


def micro_batches_in_flight(parallel: ParallelSetup, rank: int, micro_batches: int) -> float:
    """Maximum number of micro-batches that have run forward but not yet backward through a rank's stages.

    One that has passed some of the rank's v stages counts as that fraction. With p ranks and m micro-batches:

    - GPipe: m.
    - 1F1B: min(p − rank, m). Narayanan et al. 2019 (arXiv:1806.03377), section 3.2.
    - interleaved: (v−1)·p + 2·(p−1−rank) + 1 of the v·m passes through a stage. Narayanan et al. 2021
      (arXiv:2104.04473), section 2.2, and torch 2.13's `_get_warmup_ops`.
    - zero bubble: v·p passes on any rank: gradients of weights are later by as much as the first backward is
      earlier (Qi et al. 2023, arXiv:2401.10241, ZB-H1); `rank` of them also keep gradients of outputs, which are
      about as large.
    """
    ranks, stages = parallel.pipeline_parallel, parallel.stages_per_rank
    if parallel.pipeline_schedule == "gpipe":
        return micro_batches
    if parallel.pipeline_schedule == "1f1b":
        return min(ranks - rank, micro_batches)
    waits = 2 * (ranks - 1 - rank) + 1 if parallel.pipeline_schedule == "interleaved" else ranks + rank
    return min((stages - 1) * ranks + waits, stages * micro_batches) / stages


def stage_imbalance(model: ModelFacts, setup: TrainingSetup) -> float:
    """Ratio of the slowest pipeline rank's compute time to the average; 1 without a pipeline."""
    ranks, per_rank = setup.parallel.pipeline_parallel, setup.parallel.stages_per_rank
    if ranks == 1:
        return 1.0
    costs = _layer_costs(model, setup.sequence_length)
    stages = _boundaries(costs, ranks * per_rank)
    totals = [sum(sum(costs[i] for i in stages[s]) for s in range(rank, len(stages), ranks)) for rank in range(ranks)]
    return max(totals) * ranks / sum(totals)


def stage_layers(model: ModelFacts, sequence_length: int, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Kinds of layers (indices into `model.layers`) that each stage of a pipeline holds.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    order = _order(model)
    stages = _boundaries(_layer_costs(model, sequence_length), num_stages)
    return tuple(tuple(order[index] for index in stage) for stage in stages)


@functools.lru_cache(maxsize=256)
def _boundaries(costs: tuple[float, ...], num_stages: int) -> tuple[range, ...]:
    return tuple(stage_boundaries(costs, num_stages))


@functools.lru_cache(maxsize=256)
def _layer_costs(model: ModelFacts, sequence_length: int) -> tuple[float, ...]:
    """Forward FLOPs per token of each layer; the head's are added to the last, as in `pipeline.layer_costs`."""
    kinds = [
        active_linear_flops(kind) + attention_flops(replace(model, layers=(replace(kind, count=1),)), sequence_length)
        for kind in model.layers
    ]
    costs = [kinds[index] for index in _order(model)]
    return (*costs[:-1], costs[-1] + 2.0 * model.head_width * model.hidden_size)


def _order(model: ModelFacts) -> list[int]:
    """Kinds of layers from first to last: dense ones before experts, kinds of attention alternating."""
    if len({kind.mixture for kind in model.layers}) > 1:
        return [index for index, kind in enumerate(model.layers) for _ in range(kind.count)]
    places = [
        ((turn + 0.5) / kind.count, index) for index, kind in enumerate(model.layers) for turn in range(kind.count)
    ]
    return [index for _, index in sorted(places)]


def _counted(model: ModelFacts, kinds: Iterable[int]) -> tuple[LayerFacts, ...]:
    return tuple(replace(model.layers[index], count=count) for index, count in sorted(Counter(kinds).items()))


def _part(model: ModelFacts, layers: tuple[LayerFacts, ...], *, is_first: bool, is_last: bool) -> ModelFacts:
    """Some layers, with the embedding on the first stage, norm and head (a copy, if tied) on the last."""
    ends: dict[str, Any] = {"has_embedding": is_first, "has_head": is_last}
    if not is_first:
        ends |= {"position_params": 0, "outside_linears": (), "outside_other_params": 0, "frozen_params": 0}
        ends |= {"tied_embeddings": False}
    if not is_last:
        ends |= {"final_norm_params": 0}
    return replace(model, layers=layers, **ends)
