"""Operations on the tape that change a tensor's layout or dtype, not its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accel_scale.planning.tape.tape import Tape
from accel_scale.planning.tape.tensors import Parameter, Tensor


class Layouts:
    """Casts, copies, slices and joins, on a `Tape`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.new = tape.new

    def cast(self, x: Tensor, itemsize: int) -> Tensor:
        """``x.to(dtype)``: `x` itself if nothing changes."""
        if x.itemsize == itemsize:
            return x
        numel, source = x.numel, x.itemsize
        return self.tape.record(self.new(numel, itemsize), [x], [], lambda grad: [self.new(numel, source)])

    def part(self, x: Tensor, numel: float) -> Tensor:
        """A slice: a view whose gradient is written into zeros of the full size."""
        total, itemsize = x.numel, x.itemsize
        return self.tape.record(x.view(numel), [x], [], lambda grad: [self.new(total, itemsize)])

    def split(self, x: Tensor, sizes: Sequence[float]) -> list[Tensor]:
        """Views of parts from one operation, which joins their gradients in one tensor of the full size."""
        total, itemsize = x.numel, x.itemsize
        held: list[Tensor] = []

        def join(grad: Tensor) -> list[Tensor | None]:
            whole = self.new(total, itemsize)
            held.clear()
            return [whole]

        def hold(grad: Tensor) -> list[Tensor | None]:
            held.append(grad.view())
            return [Tensor(None, 0, itemsize)]

        joint = self.tape.record(x.view(), [x], [], join)
        return [self.tape.record(joint.view(size), [joint], [], hold) for size in sizes]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """``cat`` in the widest dtype: gradients are views of parts."""
        itemsize = max(part.itemsize for part in parts)
        parts = [self.cast(part, itemsize) for part in parts]
        sizes = [part.numel for part in parts]
        out = self.new(sum(sizes), itemsize)
        return self.tape.record(out, list(parts), [], lambda grad: [grad.view(size) for size in sizes])

    def expanded(self, parameter: Parameter, numel: float) -> Tensor:
        """A view of a weight for every row; its gradient is summed."""
        source, itemsize = parameter.numel, parameter.itemsize
        view = Tensor(None, numel, itemsize)
        return self.tape.record(view, [parameter], [], lambda grad: [self.new(source, itemsize)])

    def copy(self, x: Tensor) -> Tensor:
        """The same values in new memory (``contiguous`` of a transposed tensor); gradients are views."""
        return self.tape.record(self.new(x.numel, x.itemsize), [x], [], lambda grad: [grad.view()])

    def relaid(self, x: Tensor) -> Tensor:
        """A view whose gradient arrives in another layout and is copied."""
        numel, itemsize = x.numel, x.itemsize
        return self.tape.record(x.view(), [x], [], lambda grad: [self.new(numel, itemsize)])

    def repeat(self, x: Tensor, numel: float, *, is_view: bool = False) -> Tensor:
        """Key or value heads repeated to `numel` values; a single head can be repeated as a view."""
        if x.numel == numel:
            return x
        source, itemsize = x.numel, x.itemsize
        out = x.view(numel) if is_view else self.new(numel, itemsize)
        return self.tape.record(out, [x], [], lambda grad: [self.new(source, itemsize)])

    def custom(
        self,
        inputs: list[Tensor | Parameter | None],
        numel: float,
        itemsize: int,
        saved: list[Tensor | None],
        backward: Callable[[Tensor], list[Tensor | None]],
    ) -> Tensor:
        """Any other operation."""
        return self.tape.record(self.new(numel, itemsize), inputs, saved, backward)
