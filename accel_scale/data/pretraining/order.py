"""Data order, computed rather than stored: permutations of any size, shuffles, turns of sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8


def mixed(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64 chained), the same on every machine and version."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * _MIX_1 & _MASK
        state = (state ^ state >> 27) * _MIX_2 & _MASK
        state ^= state >> 31
    return state


def shuffled(count: int, key: int) -> np.ndarray:
    """The numbers below `count`, in an order determined by `key`.

    Sorted by hash: numpy's own shuffles may change with its version, and a run must be resumable after an update.
    """
    state = np.arange(count, dtype=np.uint64) ^ np.uint64(key)
    with np.errstate(over="ignore"):
        state = state + np.uint64(_GOLDEN)
        state = (state ^ state >> np.uint64(30)) * np.uint64(_MIX_1)
        state = (state ^ state >> np.uint64(27)) * np.uint64(_MIX_2)
    return np.argsort(state ^ state >> np.uint64(31), kind="stable")


class Permutation:
    """A bijection of the numbers below `size`, chosen by `key`: a Feistel network, walked until it lands below `size`.

    Takes no memory, whatever the size, and a few microseconds per number.
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} numbers")
        self._size = size
        # The network permutes the next power of 4, less than 4 × size, so that the walk is short.
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [mixed(key, index) for index in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> int:
        if not 0 <= number < self._size:
            raise IndexError(number)
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = number >> half, number & mask
            for key in self._keys:
                left, right = right, left ^ (mixed(key, right) & mask)
            number = left << half | right
            if number < self._size:
                return number


class Unit(NamedTuple):
    """What a lane takes at once: slice `part` of `parts` of a block, in an epoch (all counted from 0)."""

    epoch: int
    block: int
    part: int
    parts: int


class UnitOrder:
    """The endless sequence of units of one source: every unit once in each epoch, each epoch in another order.

    A unit is a block. A source with fewer blocks than lanes would have lanes read the same block at the same time in
    different epochs, so there a unit is a slice of a block, and an epoch has at least as many units as there are
    lanes.

    Args:
        num_blocks: Blocks of the source that are trained on.
        num_lanes: Rows of the global batch.
        seed: Determines the order.
    """

    def __init__(self, num_blocks: int, num_lanes: int, seed: int) -> None:
        self.num_blocks, self.seed = num_blocks, seed
        self.parts = max(1, -(-num_lanes // num_blocks))
        self.num_units = num_blocks * self.parts
        self._permutations: dict[int, Permutation] = {}

    def __getitem__(self, position: int) -> Unit:
        epoch, index = divmod(position, self.num_units)
        if epoch not in self._permutations:
            if len(self._permutations) > 8:  # lanes of one worker are within an epoch or two of each other
                self._permutations.clear()
            self._permutations[epoch] = Permutation(self.num_units, mixed(self.seed, epoch))
        number = self._permutations[epoch][index]
        return Unit(epoch, number // self.parts, number % self.parts, self.parts)


def furthest_behind(weights: Sequence[float], taken: Sequence[int]) -> int:
    """The source whose turn it is: the one furthest behind its share of the rows taken; the first of equals.

    Args:
        weights: Shares, summing to 1.
        taken: Rows taken so far, by source.
    """
    total = sum(taken) + 1
    behind = [weight * total - count for weight, count in zip(weights, taken, strict=True)]
    return behind.index(max(behind))


def first_turns(weights: Sequence[float], lanes: Sequence[int]) -> dict[int, list[int]]:
    """Rows counted as taken at the start of each lane: lane j enters the sequence of turns j rows late.

    All lanes follow one sequence of sources. Entering it one after the other makes the rows of any one step a
    stretch of that sequence, so that each global batch, and not only the long run, has the shares asked for.
    """
    taken = [0] * len(weights)
    wanted, found = set(lanes), {}
    for lane in range(max(lanes, default=-1) + 1):
        if lane in wanted:
            found[lane] = list(taken)
        taken[furthest_behind(weights, taken)] += 1
    return found
