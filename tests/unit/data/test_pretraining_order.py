"""Computed orders: bijections, units once per epoch, shares of sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scale.data.pretraining.order import Permutation, UnitOrder, first_turns, furthest_behind, mixed, shuffled


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 2000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_is_a_bijection(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_a_permutation_of_any_size_costs_the_same() -> None:
    huge = Permutation(10**15, 7)
    found = [huge[index] for index in range(1000)]
    assert len(set(found)) == 1000
    assert 0.4 < np.mean(found) / 10**15 < 0.6
    with pytest.raises(IndexError):
        huge[10**15]


def test_keys_give_different_orders_without_fixed_points() -> None:
    orders = [[Permutation(1000, key)[index] for index in range(1000)] for key in range(20)]
    fixed = [sum(number == index for index, number in enumerate(order)) for order in orders]
    assert sum(fixed) / 20 < 3  # a random permutation has one fixed point on average
    assert len({tuple(order) for order in orders}) == 20


def test_orders_never_change() -> None:
    """Today's checkpoint must resume tomorrow: these are the values of the first version."""
    assert mixed(1, 2, 3) == 0xD0734750FDE362B3
    assert shuffled(8, 5).tolist() == [6, 0, 2, 1, 4, 7, 3, 5]
    assert [Permutation(10, 3)[index] for index in range(10)] == [2, 8, 6, 1, 3, 9, 4, 5, 0, 7]
    assert [Permutation(7, 3)[index] for index in range(7)] == [2, 0, 6, 1, 3, 5, 4]  # an odd number of bits


@settings(deadline=None, max_examples=60)
@given(num_blocks=st.integers(1, 60), num_lanes=st.integers(1, 100), seed=st.integers(0, 99))
def test_every_unit_once_in_each_epoch(num_blocks: int, num_lanes: int, seed: int) -> None:
    order = UnitOrder(num_blocks, num_lanes, seed)
    assert order.num_units >= num_lanes  # so that no two lanes share a block in different epochs at once
    for epoch in range(2):
        units = [order[epoch * order.num_units + index] for index in range(order.num_units)]
        assert {unit.epoch for unit in units} == {epoch}
        parts = sorted((unit.block, unit.part) for unit in units)
        assert parts == [(block, part) for block in range(num_blocks) for part in range(order.parts)]


@settings(deadline=None, max_examples=40)
@given(
    raw=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    num_lanes=st.integers(1, 40),
    steps=st.integers(1, 60),
)
def test_shares_hold_in_each_step_and_in_each_lane(raw: list[int], num_lanes: int, steps: int) -> None:
    weights = [value / sum(raw) for value in raw]
    taken = first_turns(weights, range(num_lanes))
    begun = {lane: list(counts) for lane, counts in taken.items()}
    for _ in range(steps):
        batch = [0] * len(weights)
        for counts in taken.values():
            turn = furthest_behind(weights, counts)
            counts[turn] += 1
            batch[turn] += 1
        for weight, count in zip(weights, batch, strict=True):
            assert abs(count - weight * num_lanes) <= len(weights)
    for lane, counts in taken.items():
        for weight, before, after in zip(weights, begun[lane], counts, strict=True):
            assert abs(after - before - weight * steps) <= len(weights)
