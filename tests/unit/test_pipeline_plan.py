"""Which layers each pipeline stage gets and how long stages wait: pure arithmetic."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from accel_scale.errors import ConfigError
from accel_scale.parallel.pipelines.settings import PipelineSettings, check_pipeline, stages_of_rank
from accel_scale.planning.cost.pipeline import bubble_fraction, layer_costs, stage_boundaries

COSTS = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=9)


def every_split(costs: list[float], num_stages: int):
    for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1):
        ends = [0, *cuts, len(costs)]
        yield [range(begin, end) for begin, end in itertools.pairwise(ends)]


def largest(costs: list[float], split: list[range]) -> float:
    return max(sum(costs[i] for i in stage) for stage in split)


def squares(costs: list[float], split: list[range]) -> float:
    return sum(sum(costs[i] for i in stage) ** 2 for stage in split)


@given(COSTS, st.data())
def test_no_split_has_a_cheaper_most_expensive_stage(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    split = stage_boundaries(costs, num_stages)
    assert [i for stage in split for i in stage] == list(range(len(costs)))
    assert len(split) == num_stages
    assert all(split)
    splits = list(every_split(costs, num_stages))
    best = min(largest(costs, other) for other in splits)
    assert largest(costs, split) == pytest.approx(best)
    as_good = [other for other in splits if largest(costs, other) <= best * (1 + 1e-12)]
    assert squares(costs, split) <= min(squares(costs, other) for other in as_good) * (1 + 1e-6) + 1e-9


def test_the_most_expensive_stage_comes_before_evenness():
    """Here, the split with the smallest sum of squares has a more expensive stage."""
    costs = [3.0, 2.0, 5.0, 1.0]
    assert largest(costs, stage_boundaries(costs, 3)) == 5
    assert largest(costs, min(every_split(costs, 3), key=lambda split: squares(costs, split))) == 6


def test_the_head_takes_layers_from_the_last_stage():
    config = LlamaConfig(
        vocab_size=32000, hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4
    )
    costs = layer_costs(config.to_dict(), 512)
    assert len(set(costs[:-1])) == 1
    assert costs[-1] - costs[0] == 2 * 32000 * 256
    stages = stage_boundaries(costs, 4)
    assert [len(stage) for stage in stages] == [3, 4, 4, 1]


def test_sliding_layers_are_cheaper_where_they_stand():
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, sliding_window=16, layer_types=["sliding_attention"] * 2 + ["full_attention"] * 4,
    )  # fmt: skip
    costs = layer_costs(config.to_dict(), 1024)
    assert costs[0] == costs[1] < costs[2] == costs[3] == costs[4]


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match="2 layers cannot be divided among 3"):
        stage_boundaries([1.0, 1.0], 3)


def test_bubbles():
    assert bubble_fraction("1f1b", 4, 8) == bubble_fraction("gpipe", 4, 8) == 3 / 11
    assert bubble_fraction("interleaved", 4, 8, 2) == 3 / 19
    assert bubble_fraction("zero_bubble", 4, 8) == 3 / 27
    with pytest.raises(ConfigError, match="not a pipeline schedule"):
        bubble_fraction("2f2b", 4, 8)


@pytest.mark.parametrize(
    ("schedule", "stages", "problem"),
    [("2f2b", 1, "not a pipeline schedule"), ("1f1b", 2, "2 stages per rank"), ("interleaved", 1, "2 or more stages")],
)
def test_settings_that_do_not_exist(schedule, stages, problem):
    with pytest.raises(ConfigError, match=problem):
        PipelineSettings(schedule, stages)


@pytest.mark.parametrize(
    ("settings", "pp_size", "micro_batches", "problem"),
    [
        (PipelineSettings("1f1b"), 1, 4, "is none"),
        (PipelineSettings("1f1b"), 8, 8, "6 layers cannot be divided among 8 stages"),
        (PipelineSettings("interleaved", 2), 4, 8, "6 layers cannot be divided among 8 stages"),
        (PipelineSettings("1f1b"), 4, 3, "a micro-batch for each of the 4 ranks"),
        (PipelineSettings("interleaved", 2), 2, 5, "2 rounds, which must be equal.*multiple of 2, such as 4"),
        (PipelineSettings("zero_bubble"), 2, 5, "2 rounds"),
    ],
)
def test_pipelines_that_cannot_run_are_refused(settings, pp_size, micro_batches, problem):
    with pytest.raises(ConfigError, match=problem):
        check_pipeline(GPT2Config(n_layer=6), settings, pp_size, micro_batches)


def test_selective_checkpointing_does_not_go_with_a_split_backward_pass():
    config = GPT2Config(n_layer=6)
    with pytest.raises(ConfigError, match="selective checkpointing"):
        check_pipeline(config, PipelineSettings("zero_bubble"), 2, 4, checkpointing="selective")
    check_pipeline(config, PipelineSettings("1f1b"), 2, 4, checkpointing="selective")
    with pytest.raises(ConfigError, match="recomputed as a whole"):
        check_pipeline(config, PipelineSettings("1f1b"), 2, 4, checkpointing="segments_2")
    check_pipeline(config, PipelineSettings("zero_bubble"), 2, 4, checkpointing="full")


def test_pipelines_that_can_run():
    check_pipeline(GPT2Config(n_layer=6), PipelineSettings("gpipe"), 4, 1)
    check_pipeline(GPT2Config(n_layer=8), PipelineSettings("interleaved", 2), 4, 8)
    assert stages_of_rank(PipelineSettings("interleaved", 3), 2, 1) == (1, 3, 5)
