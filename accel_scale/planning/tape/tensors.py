"""Sizes instead of tensors: memory with reference counts, parameters, and the nodes of a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class Meter:
    """Bytes in live tensors, now and at their highest; `marks` keep values that callers ask for by name."""

    def __init__(self) -> None:
        self.live_bytes = 0.0
        self.peak_bytes = 0.0

    def allocate(self, num_bytes: float) -> None:
        """Count `num_bytes` as live."""
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def free(self, num_bytes: float) -> None:
        """Count `num_bytes` as gone."""
        self.live_bytes -= num_bytes

    def reset_peak(self) -> None:
        """Start a new high-water mark at what is live."""
        self.peak_bytes = self.live_bytes


class Storage:
    """Memory that one or more tensors look at; freed with the last of them."""

    __slots__ = ("meter", "num_bytes", "users")

    def __init__(self, meter: Meter, num_bytes: float) -> None:
        self.meter, self.num_bytes, self.users = meter, num_bytes, 0
        meter.allocate(num_bytes)

    def __del__(self) -> None:
        self.meter.free(self.num_bytes)


class Tensor:
    """Number of values, bytes of each, memory, and the node that made it (None: no gradient wanted)."""

    __slots__ = ("itemsize", "node", "numel", "storage")

    def __init__(self, storage: Storage | None, numel: float, itemsize: int, node: Node | None = None) -> None:
        self.storage, self.numel, self.itemsize, self.node = storage, numel, itemsize, node
        if storage is not None:
            storage.users += 1

    def __del__(self) -> None:
        if self.storage is not None:
            self.storage.users -= 1

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return self.node is not None

    def view(self, numel: float | None = None) -> Tensor:
        """The same memory under another handle: gradients pass through without a copy."""
        return Tensor(self.storage, self.numel if numel is None else numel, self.itemsize, self.node)


# A backward function gets the gradient of the output and returns one gradient per input; None where none is wanted.
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
    """A weight: `tensor` is not counted (weights are counted elsewhere), its gradient is."""

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
    """A checkpointed block: run again, with what it saves, when the first of its nodes is reached."""

    function: Callable[[], Tensor]
    keeps_products: bool = False
    nodes: list[Node] = field(default_factory=list)
    products: deque[Tensor] = field(default_factory=deque)
    is_done: bool = False
    num_saving: int = 0
