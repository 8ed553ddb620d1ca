"""Sizes instead of tensors: memory with reference counts, parameters, and the nodes of a graph."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class Meter:
    """Bytes in live tensors, current and peak."""

    __slots__ = ("live_bytes", "peak_bytes")

    def __init__(self) -> None:
        self.live_bytes = 0.0
        self.peak_bytes = 0.0

    def reset_peak(self) -> None:
        """Reset the high-water mark to the live bytes."""
        self.peak_bytes = self.live_bytes


class Storage:
    """Memory shared by one or more tensors; freed with the last of them."""

    __slots__ = ("meter", "num_bytes")

    def __init__(self, meter: Meter, num_bytes: float) -> None:
        self.meter, self.num_bytes = meter, num_bytes
        meter.live_bytes += num_bytes
        if meter.live_bytes > meter.peak_bytes:
            meter.peak_bytes = meter.live_bytes

    def __del__(self) -> None:
        self.meter.live_bytes -= self.num_bytes


# References to the memory of a single tensor while they are counted: the tensor's and the call's. Nothing else keeps
# one; None has more.
_ALONE = 2


class Tensor:
    """Number of values, bytes per value, memory, and the node that made it (None: no gradient wanted)."""

    __slots__ = ("itemsize", "node", "numel", "storage")

    def __init__(self, storage: Storage | None, numel: float, itemsize: int, node: Node | None = None) -> None:
        self.storage, self.numel, self.itemsize, self.node = storage, numel, itemsize, node

    @property
    def is_alone(self) -> bool:
        """True if no other tensor shares its memory."""
        return sys.getrefcount(self.storage) == _ALONE

    @property
    def requires_grad(self) -> bool:
        """True if a gradient flows to the tensor."""
        return self.node is not None

    def view(self, numel: float | None = None) -> Tensor:
        """The same memory under another handle: gradients pass through without a copy."""
        return Tensor(self.storage, self.numel if numel is None else numel, self.itemsize, self.node)


# A backward function gets the gradient of the output and returns one gradient per input; None if none is wanted.
Backward = Callable[[Tensor], Sequence["Tensor | None"]]


class Node:
    """One operation: its inputs' nodes, what it saved, and its backward function."""

    __slots__ = ("backward", "inputs", "order", "parameter", "recompute", "saved", "shapes")

    def __init__(self, order: int, inputs: Sequence[Node | None], saved: list[Tensor], backward: Backward | None):
        self.order, self.inputs, self.saved, self.backward = order, inputs, saved, backward
        self.parameter: Parameter | None = None
        self.recompute: Recompute | None = None
        self.shapes: Sequence[tuple[float, int]] = ()


class Parameter:
    """A weight: its gradient is counted, the weight itself is not (weights are counted elsewhere)."""

    __slots__ = ("grad", "itemsize", "node", "numel", "trained")

    def __init__(self, numel: float, itemsize: int, *, trained: bool = True) -> None:
        self.numel, self.itemsize, self.trained = numel, itemsize, trained
        self.grad: Tensor | None = None
        self.node: Node | None = None
        if trained:
            # Torch runs gradient accumulation before any other node that is ready.
            self.node = Node(2**62, (), [], None)
            self.node.parameter = self


@dataclass
class Recompute:
    """A checkpointed block, run again to save its tensors when the backward pass reaches the first of its nodes."""

    function: Callable[[], Tensor]
    keeps_products: bool = False
    every: int = 1
    num_products: int = 0
    nodes: list[Node] = field(default_factory=list)
    products: deque[Tensor | None] = field(default_factory=deque)
    is_done: bool = False
    num_saving: int = 0
