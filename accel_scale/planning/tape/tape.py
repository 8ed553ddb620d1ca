"""Autograd on sizes: tensors without values, allocated and freed as in torch, to find memory peaks.

Python's own reference counts decide when a tensor dies, as they do for torch's. The backward pass runs nodes in
torch's order, accumulates gradients in place where torch does, and recomputes checkpointed blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from accel_scale.planning.tape.tensors import Backward, Meter, Node, Parameter, Recompute, Storage, Tensor


class _Enough(Exception):
    """Everything that a recomputation has to save is saved: torch stops there."""


class Tape:
    """Makes tensors and records operations.

    Attributes:
        meter: Counts live bytes.
        gradient_bytes: Gradients of parameters that are complete.
        autocast_bytes: Bytes per value of the inputs of matrix products under autocast; None without autocast.
        adds_in_place: Whether two gradients of one tensor are summed in place. Torch does, except while a dispatch
            mode (a memory tracker, for instance) is active.
        is_cuda: Whether kernels are CUDA's rather than the CPU's, which sometimes need a copy.
        caches_casts: Whether weights cast for autocast are kept for the next product that uses them.
        keeps_casts: Whether that also holds without a graph, until autocast is left.
    """

    def __init__(self, *, autocast_bytes: int | None = None, adds_in_place: bool = True, is_cuda: bool = True) -> None:
        self.meter, self.gradient_bytes = Meter(), 0.0
        self.autocast_bytes = autocast_bytes
        self.adds_in_place, self.is_cuda = adds_in_place, is_cuda
        self.weight_casts: dict[int, Tensor] = {}
        self.caches_casts, self.keeps_casts = True, False
        self._is_muted = False
        self._order = 0
        self._recompute: Recompute | None = None
        self._dropping: Recompute | None = None
        self._refilled = 0

    def new(self, numel: float, itemsize: int) -> Tensor:
        """A tensor with new memory."""
        return Tensor(Storage(self.meter, numel * itemsize), numel, itemsize)

    @property
    def is_recomputing(self) -> bool:
        """True while a checkpointed block is run for the second time."""
        return self._recompute is not None

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Record nothing inside: a forward pass without gradients."""
        self._is_muted, before = True, self._is_muted
        try:
            yield
        finally:
            self._is_muted = before

    def product(self, numel: float, itemsize: int, *, is_linear: bool = False) -> Tensor:
        """The result of a matrix product or of attention, which selective checkpointing keeps.

        Of the products of linear layers, `is_linear`, it may keep only every n-th.
        """
        if self._is_muted:
            return self.new(numel, itemsize)
        if self._dropping is not None and self._dropping.keeps_products:
            result, block = self.new(numel, itemsize), self._dropping
            is_kept = not is_linear or block.num_products % block.every == 0
            block.num_products += is_linear
            block.products.append(result.view() if is_kept else None)
            return result
        if self._recompute is not None and self._refilled + 1 == self._recompute.num_saving:
            # Torch stops before the last operation that saves something computes its result.
            return Tensor(None, numel, itemsize)
        if self._recompute is not None and self._recompute.products:
            return self._recompute.products.popleft() or self.new(numel, itemsize)
        return self.new(numel, itemsize)

    def record(
        self,
        output: Tensor,
        inputs: Sequence[Tensor | Parameter | None],
        saved: Iterable[Tensor | None],
        backward: Backward,
        shapes: Sequence[tuple[float, int]] = (),
    ) -> Tensor:
        """Record `output` as the result of an operation on `inputs` that keeps `saved`.

        `shapes` are the inputs' numbers of values and bytes per value, for gradients that may be larger: torch sums
        and casts them after the operation's own backward.
        """
        if self._is_muted:
            return output
        nodes = [None if value is None else value.node for value in inputs]
        if not any(nodes):
            return output
        self._order += 1
        kept = [tensor.view() for tensor in saved if tensor is not None] if saved else []
        node = Node(self._order, nodes, kept, backward)
        node.shapes = shapes
        if self._dropping is not None:
            # The forward pass of a checkpointed block: what operations save is dropped and recomputed later.
            node.saved, node.recompute = [], self._dropping if kept else None
            self._dropping.nodes.append(node)
            if kept:
                self._dropping.num_saving = len(self._dropping.nodes)
        elif self._recompute is not None:
            self._refill(node)
        output.node = node
        return output

    def checkpoint(
        self, function: Callable[[], Tensor], kept: Iterable[Tensor], *, keeps_products: bool = False, every: int = 1
    ) -> Tensor:
        """Run `function`, keeping the tensors `kept` but nothing that its operations save.

        The backward pass runs it again. With `keeps_products`, results of attention and of `every` n-th matrix product
        are kept and not recomputed. Nested blocks are not supported.
        """
        block = Recompute(function, keeps_products, every)
        inputs = [tensor.view() for tensor in kept]
        block.function = lambda: (function(), inputs)[0]
        self._dropping = block
        try:
            return function()
        finally:
            self._dropping = None

    def _refill(self, node: Node) -> None:
        block = self._recompute
        assert block is not None
        if len(block.nodes) > self._refilled:
            block.nodes[self._refilled].saved = node.saved
        self._refilled += 1
        if self._refilled == block.num_saving:
            raise _Enough

    def _run_again(self, block: Recompute) -> None:
        block.is_done = True
        self._recompute, self._refilled = block, 0
        try:
            block.function()
        except _Enough:
            pass
        finally:
            self._recompute = None
            # Each recomputation enters autocast again, and drops its casts on leaving it.
            self.weight_casts.clear()

    def leave_autocast(self) -> None:
        """End the forward pass: weights cast for it stay only if the backward pass needs them."""
        self.weight_casts.clear()

    def mark(self, x: Tensor, note: Callable[[], None]) -> Tensor:
        """Pass `x` through a node that calls `note` when the backward pass reaches it."""

        def backward(grad: Tensor) -> list[Tensor | None]:
            note()
            return [grad.view()]

        return self.record(x.view(), [x], [], backward)

    def backward(self, loss: Tensor, grad: Tensor | None = None) -> None:
        """Run the graph of `loss` backwards, from `grad` or a scalar; gradients of parameters are stored in them."""
        if loss.node is None:
            return
        waiting = _count_uses(loss.node)
        buffers: dict[int, Tensor] = {id(loss.node): self.new(1, loss.itemsize) if grad is None else grad.view()}
        del grad
        ready = [(-loss.node.order, id(loss.node), loss.node)]
        loss.node = None
        while ready:
            _, key, node = heapq.heappop(ready)
            grad = buffers.pop(key)
            if node.parameter is not None:
                self._accumulate(node.parameter, grad)
                continue
            if node.recompute is not None and not node.recompute.is_done:
                self._run_again(node.recompute)
            assert node.backward is not None
            grads = list(node.backward(grad))
            del grad
            if node.shapes:
                self._fit(grads, node.shapes)
            node.saved, node.backward, node.recompute = [], None, None
            for index, source in enumerate(node.inputs):
                if source is None:
                    continue
                key, value, grads[index] = id(source), grads[index], None
                if value is not None:
                    self._add(buffers, key, value)
                del value
                waiting[key] -= 1
                if not waiting[key] and key in buffers:
                    heapq.heappush(ready, (-source.order, key, source))

    def _fit(self, grads: list[Tensor | None], shapes: Sequence[tuple[float, int]]) -> None:
        for index, (numel, itemsize) in enumerate(shapes):
            made = grads[index]
            if made is not None and (made.numel != numel or made.itemsize != itemsize):
                grads[index] = self.new(numel, itemsize)
            del made

    def _add(self, buffers: dict[int, Tensor], key: int, value: Tensor) -> None:
        """Sum two gradients of one tensor: in place if nothing else holds one of them, otherwise in new memory."""
        present = buffers.get(key)
        if present is None:
            buffers[key] = value.view()
            return
        # The caller's handle is `value`'s only one.
        if self.adds_in_place and (present.is_alone or value.is_alone):
            if present.storage is not None and not present.is_alone:
                buffers[key] = value.view()
            return
        buffers[key] = self.new(value.numel, value.itemsize)

    def _accumulate(self, parameter: Parameter, grad: Tensor) -> None:
        if parameter.grad is not None:
            return
        self.gradient_bytes += parameter.numel * parameter.itemsize
        is_own = grad.is_alone and grad.itemsize == parameter.itemsize
        parameter.grad = grad if is_own else self.new(parameter.numel, parameter.itemsize)


def _count_uses(root: Node) -> dict[int, int]:
    """Number of nodes that send a gradient to each node."""
    uses: dict[int, int] = {}
    stack = [root]
    while stack:
        for source in stack.pop().inputs:
            if source is None:
                continue
            if (key := id(source)) not in uses:
                uses[key] = 0
                stack.append(source)
            uses[key] += 1
    return uses
