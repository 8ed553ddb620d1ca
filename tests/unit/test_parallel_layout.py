"""Which rank does what when ranks share a model, and which launches and flags do not divide evenly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.parallel.layout import ParallelLayout
from accel_scale.starting.layout import layout_of

sizes = st.integers(1, 4)
layouts = st.builds(ParallelLayout, pp=sizes, dp_replicate=sizes, dp_shard=sizes, sp=sizes, tp=sizes)


def is_first_reader(place: dict[str, int]) -> bool:
    return not (place["pp"] or place["sp"] or place["tp"])


@given(layouts)
def test_every_rank_has_one_place_and_every_row_one_reader_that_speaks(layout: ParallelLayout) -> None:
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert len({tuple(place.items()) for place in places}) == layout.world_size
    speakers = [rank for rank in range(layout.world_size) if is_first_reader(layout.coordinate(rank))]
    assert sorted(layout.data_rank(rank) for rank in speakers) == list(range(layout.data_ranks))
    for rank in range(layout.world_size):
        assert 0 <= layout.data_rank(rank) < layout.data_ranks
    assert layout.data_ranks * layout.model_ranks == layout.world_size


@given(layouts)
def test_neighbours_share_matrix_products_and_stages_are_far_apart(layout: ParallelLayout) -> None:
    first = layout.coordinate(0)
    assert all(layout.coordinate(rank) == first | {"tp": rank} for rank in range(layout.tp))
    apart = layout.world_size // layout.pp
    assert all(layout.coordinate(stage * apart) == first | {"pp": stage} for stage in range(layout.pp))


def launch(strategy: LaunchStrategy, world_size: int) -> SimpleNamespace:
    return SimpleNamespace(parallel=strategy, num_processes=world_size, place=lambda key: f"file:{key}")


def parsed(**given_flags: object) -> SimpleNamespace:
    return SimpleNamespace(explicit=given_flags, place=lambda name: f"--{name}")


@pytest.mark.parametrize(
    ("strategy", "world_size", "flags", "expected"),
    [
        (LaunchStrategy("ddp"), 8, {"tp_size": 2, "pp_size": 2}, {"tp": 2, "pp": 2, "dp_replicate": 2}),
        (LaunchStrategy("fsdp2"), 8, {"tp_size": 2}, {"tp": 2, "dp_shard": 4}),
        (LaunchStrategy("fsdp2", num_replicas=2), 8, {"sp_size": 2}, {"sp": 2, "dp_shard": 2, "dp_replicate": 2}),
        (LaunchStrategy("fsdp2", tensor_parallel_size=2, num_shards=2), 4, {}, {"tp": 2, "dp_shard": 2}),
        (LaunchStrategy("fsdp2"), 2, {"sp_size": 2}, {"sp": 2}),
        (LaunchStrategy("ddp"), 4, {}, {"dp_replicate": 4}),
    ],
)  # fmt: skip
def test_what_flags_leave_is_data_parallel_as_the_launch_file_says(strategy, world_size, flags, expected) -> None:
    found = layout_of(parsed(**flags), launch(strategy, world_size))
    assert found == ParallelLayout(**expected, fsdp=strategy.name == "fsdp2")
    assert found.shards_weights == (strategy.name == "fsdp2")


@pytest.mark.parametrize(
    ("strategy", "world_size", "flags", "says", "fix"),
    [
        (LaunchStrategy("ddp"), 6, {"tp_size": 4}, "6 launched cannot be divided by --tp_size 4", "multiple of 4"),
        (LaunchStrategy("single"), 1, {"pp_size": 2}, "1 launched cannot be divided", "multiple of 2"),
        (LaunchStrategy("zero3"), 4, {"tp_size": 2}, "ZeRO-3 shards by itself", "ddp.yaml"),
        (LaunchStrategy("fsdp2", tensor_parallel_size=2), 4, {"tp_size": 4}, "the launch file says 2", "remove one"),
        (LaunchStrategy("fsdp2", offload_params="cpu"), 4, {"tp_size": 2}, "CPU offload", "false"),
        (LaunchStrategy("fsdp2", context_parallel_size=2), 4, {}, "ring context parallelism", "--sp_size"),
        (LaunchStrategy("fsdp2", num_replicas=2), 6, {"tp_size": 2}, "3 data-parallel ranks cannot form 2", "divisor"),
        (LaunchStrategy("ddp"), 4, {"pp_schedule": "gpipe"}, "does nothing without a pipeline", "--pp_size"),
        (LaunchStrategy("ddp"), 4, {"sp_size": 0}, "0 is too small", "1 or more"),
    ],
)  # fmt: skip
def test_what_does_not_come_out_even_is_refused_with_a_way_out(strategy, world_size, flags, says, fix) -> None:
    with pytest.raises(ConfigError) as refused:
        layout_of(parsed(**flags), launch(strategy, world_size))
    assert says in str(refused.value)
    assert fix in refused.value.fix


def test_shipped_launch_files_come_to_the_layouts_they_describe() -> None:
    from accel_scale.launching.launch_file import read_launch_file

    expected = {
        "tp": ({}, ParallelLayout(tp=2, fsdp=True)),
        "fsdp2_tp": ({}, ParallelLayout(dp_shard=2, tp=2, fsdp=True)),
        "fsdp2_sp": ({}, ParallelLayout(dp_shard=2, sp=2, fsdp=True)),
        "pp": ({"pp_size": 2}, ParallelLayout(pp=2)),
        "3d": ({"pp_size": 2}, ParallelLayout(pp=2, dp_shard=2, tp=2, fsdp=True)),
    }
    for name, (flags, layout) in expected.items():
        file = read_launch_file(Path("accelerate_configs") / f"{name}.yaml")
        found = layout_of(parsed(**flags), launch(file.parallel, file.num_processes or 1))
        assert found == layout, name


@pytest.mark.parametrize(
    ("sizes", "is_plain", "can_generate", "shards_weights", "label"),
    [
        ({}, True, True, False, "one rank"),
        ({"dp_replicate": 2}, True, True, False, "DP 2"),
        ({"dp_shard": 2}, True, True, True, "FSDP2 2"),
        ({"tp": 2}, False, True, False, "TP 2"),
        ({"pp": 2}, False, False, False, "PP 2"),
        ({"sp": 2}, False, False, False, "SP 2"),
        ({"sp": 2, "fsdp": True}, False, False, True, "SP 2"),
        ({"pp": 2, "sp": 2, "dp_replicate": 3}, False, False, False, "PP 2 × DP 3 × SP 2"),
    ],
)
def test_what_a_layout_means(sizes, is_plain, can_generate, shards_weights, label) -> None:
    layout = ParallelLayout(**sizes)
    assert (layout.is_plain, layout.can_generate, layout.shards_weights) == (is_plain, can_generate, shards_weights)
    assert layout.label == label
