"""Torch's CUDA caching allocator, played over the tensors of the planner's tape.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13, fixed segments).
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from unittest import mock

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.activations import ShadowModel
from accel_scale.planning.tape.ops import Ops
from accel_scale.planning.tape.tape import Tape
from accel_scale.planning.tape.tensors import Meter, Storage

MIB, GIB = 2**20, 2**30


class Block:
    """A part of a segment, in a list with its neighbours."""

    __slots__ = ("address", "following", "is_small", "is_used", "preceding", "size")

    def __init__(self, address: int, size: int, is_small: bool) -> None:
        self.address, self.size, self.is_small, self.is_used = address, size, is_small, False
        self.preceding: Block | None = None
        self.following: Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Free blocks are sorted by size, then address."""
        return self.size, self.address


class CachingAllocator:
    """Torch's allocator: the smallest free block that is large enough, split if much is left, merged when freed.

    Attributes:
        reserved: Bytes of all segments.
        allocated: Bytes of blocks in use.
        peak: The most that was ever in use.
    """

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, num_bytes: float) -> Block:
        """A block of at least `num_bytes`; a new segment if no free block is large enough."""
        size = max(512, -(-int(num_bytes) // 512) * 512)
        is_small = size <= MIB
        pool = self._free[is_small]
        at = bisect.bisect_left(pool, (size, -1), key=lambda block: block.order)
        block = pool.pop(at) if at < len(pool) else self._new_segment(size, is_small)
        rest = block.size - size
        if rest >= 512 if is_small else rest > MIB:
            other = Block(block.address + size, rest, is_small)
            other.preceding, other.following, block.size = block, block.following, size
            if block.following is not None:
                block.following.preceding = other
            block.following = other
            self._keep(other)
        block.is_used = True
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        block.is_used = False
        self.allocated -= block.size
        for first, second in ((block, block.following), (block.preceding, block)):
            if first is None or second is None or first.is_used or second.is_used:
                continue
            self._forget(second if second is not block else first)
            first.size, first.following = first.size + second.size, second.following
            if second.following is not None:
                second.following.preceding = first
            block = first
        self._keep(block)

    def _new_segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            amount = 2 * MIB
        else:
            amount = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += amount
        block = Block(self._next_address, amount, is_small)
        self._next_address += amount + MIB
        return block

    def _keep(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], block, key=lambda kept: kept.order)

    def _forget(self, block: Block) -> None:
        pool = self._free[block.is_small]
        del pool[bisect.bisect_left(pool, block.order, key=lambda kept: kept.order)]


@contextlib.contextmanager
def served_by(allocator: CachingAllocator) -> Iterator[None]:
    """Serve every tensor of the planner's tape from `allocator`."""
    blocks: dict[int, Block] = {}
    create, delete = Storage.__init__, Storage.__del__

    def created(self: Storage, meter: Meter, num_bytes: float) -> None:
        create(self, meter, num_bytes)
        if num_bytes > 0:
            blocks[id(self)] = allocator.allocate(num_bytes)

    def deleted(self: Storage) -> None:
        delete(self)
        if (block := blocks.pop(id(self), None)) is not None:
            allocator.free(block)

    with mock.patch.multiple(Storage, __init__=created, __del__=deleted):
        yield
        for block in blocks.values():
            allocator.free(block)


class Graph:
    """One forward and backward pass on the tape. Gradients live as long as this does."""

    def __init__(self, model: ModelFacts, setup: TrainingSetup) -> None:
        self.tape = Tape(autocast_bytes=setup.compute_bytes if setup.autocast else None)
        self.state = ShadowModel(Ops(self.tape), model, setup)
        states = self.state.run_layers(self.state.embed(), lambda: None)
        loss = self.state.loss(self.state.finish(states))
        del states
        self.tape.leave_autocast()
        self.tape.backward(loss)
