"""Operations on the tape: what each allocates and saves, and what its backward pass allocates."""

from __future__ import annotations

import functools

from accel_scale.planning.tape.layouts import Layouts
from accel_scale.planning.tape.tensors import Parameter, Tensor

FP32 = 4


class Ops(Layouts):
    """torch's operations as transformers' layers use them, on a `Tape`.

    Attributes:
        keeps_quantised_inputs: As in `TrainingSetup`.
    """

    keeps_quantised_inputs = False

    @functools.cached_property
    def quantised_inputs(self) -> dict[int, float]:
        """Bytes of the inputs of 4-bit products, by their memory."""
        return {}

    def autocast(self, x: Tensor) -> Tensor:
        """`x` in the dtype of matrix products under autocast."""
        return x if self.tape.autocast_bytes is None else self.cast(x, self.tape.autocast_bytes)

    def weight(self, parameter: Parameter, *, is_cached: bool = True) -> Tensor:
        """A weight in the dtype of products; trained ones are cast once per forward pass, unless transposed."""
        itemsize = self.tape.autocast_bytes
        if itemsize is None or itemsize == parameter.itemsize:
            return Tensor(None, parameter.numel, parameter.itemsize, parameter.node)
        if id(parameter) in self.tape.weight_casts:
            return self.tape.weight_casts[id(parameter)]
        numel, source = parameter.numel, parameter.itemsize
        cast = self.new(numel, itemsize)
        if parameter.trained:
            self.tape.record(cast, [parameter], [], lambda grad: [self.new(numel, source)])
            if (cast.node is not None or self.tape.keeps_casts) and is_cached and self.tape.caches_casts:
                self.tape.weight_casts[id(parameter)] = cast
        return cast

    def linear(
        self, x: Tensor, parameter: Parameter, out_features: float, bias: Parameter | None = None, *,
        is_cached: bool = True,
    ) -> Tensor:  # fmt: skip
        """``x @ weight.T + bias``; `parameter` has in × out values. `is_cached` as for `weight`."""
        x, weight = self.autocast(x), self.weight(parameter, is_cached=is_cached)
        in_features = parameter.numel / out_features
        tokens = x.numel / in_features
        offset = None if bias is None else self.weight(bias)
        out = self.tape.product(tokens * out_features, x.itemsize, is_linear=True)
        wants = (x.requires_grad, parameter.trained, bias is not None and bias.trained)
        x_numel, numel, itemsize, has_bias = x.numel, parameter.numel, x.itemsize, bias is not None

        def backward(grad: Tensor) -> list[Tensor | None]:
            # Torch's order: without a bias the weight's gradient comes first.
            weight_grad = self.new(numel, itemsize) if wants[1] and not has_bias else None
            x_grad = self.new(x_numel, itemsize) if wants[0] else None
            if wants[1] and has_bias:
                weight_grad = self.new(numel, itemsize)
            return [x_grad, weight_grad, self.new(out_features, itemsize) if wants[2] else None]

        saved = [x if wants[1] else None, weight if wants[0] else None]
        return self.tape.record(out, [x, weight, offset], saved, backward)

    def quantised_linear(self, x: Tensor, in_features: float, out_features: float) -> Tensor:
        """bitsandbytes' 4-bit product, which dequantises the weight in the forward and backward pass."""
        x = self.autocast(x)
        itemsize, x_numel, numel = x.itemsize, x.numel, in_features * out_features
        # The CPU's kernel dequantises while multiplying. No checkpointing policy knows the operation.
        weight = self.new(numel if self.tape.is_cuda else 0, itemsize)
        out = self.new(x.numel / in_features * out_features, itemsize)
        del weight

        def backward(grad: Tensor) -> list[Tensor | None]:
            dequantised = self.new(numel, itemsize)
            x_grad = self.new(x_numel, itemsize)
            del dequantised
            return [x_grad]

        if not self.keeps_quantised_inputs:
            return self.tape.record(out, [x], [], backward)
        if x.storage is not None:
            self.quantised_inputs[id(x.storage)] = x.storage.num_bytes
        return self.tape.record(out, [x], [x], backward)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b``, in the wider dtype."""
        out = self.new(max(a.numel, b.numel), max(a.itemsize, b.itemsize))
        wanted = (a.requires_grad, b.requires_grad)

        def backward(grad: Tensor) -> list[Tensor | None]:
            return [grad.view() if wants else None for wants in wanted]

        return self.tape.record(out, [a, b], [], backward, [(t.numel, t.itemsize) for t in (a, b)])

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """``a * b``, where either may be broadcast."""
        itemsize, numel = max(a.itemsize, b.itemsize), max(a.numel, b.numel)
        out = self.new(numel, itemsize)
        wanted = (a.requires_grad, b.requires_grad)

        def backward(grad: Tensor) -> list[Tensor | None]:
            return [self.new(numel, itemsize) if wants else None for wants in wanted]

        saved = [b if a.requires_grad else None, a if b.requires_grad else None]
        return self.tape.record(out, [a, b], saved, backward, [(t.numel, t.itemsize) for t in (a, b)])

    def scale(self, a: Tensor) -> Tensor:
        """``a * number``."""
        numel, itemsize = a.numel, a.itemsize
        return self.tape.record(self.new(numel, itemsize), [a], [], lambda grad: [self.new(numel, itemsize)])

    def scaled_in_place(self, a: Tensor) -> Tensor:
        """``a *= number``."""
        numel, itemsize = a.numel, a.itemsize
        return self.tape.record(a.view(), [a], [], lambda grad: [self.new(numel, itemsize)])

    def add_in_place(self, a: Tensor, b: Tensor) -> Tensor:
        """``a += b``."""
        return self.tape.record(a.view(), [a, b], [], lambda grad: [grad.view(), grad.view()])

    def shift(self, a: Tensor) -> Tensor:
        """``a + number``."""
        return self.tape.record(self.new(a.numel, a.itemsize), [a], [], lambda grad: [grad.view()])

    def weighted(self, parameter: Parameter, x: Tensor) -> Tensor:
        """``weight * x`` with one weight per feature."""
        weight = Tensor(None, parameter.numel, parameter.itemsize, parameter.node)
        return self.mul(weight, x)

    def elementwise(self, x: Tensor, *, saves_input: bool = True, temporaries: int = 0) -> Tensor:
        """An elementwise function that saves its input or its result; backward needs `temporaries` more tensors."""
        numel, itemsize = x.numel, x.itemsize
        out = self.new(numel, itemsize)

        def backward(grad: Tensor) -> list[Tensor | None]:
            scratch = [self.new(numel, itemsize) for _ in range(temporaries)]
            result = self.new(numel, itemsize)
            del scratch
            return [result]

        return self.tape.record(out, [x], [x if saves_input else out], backward)

    def clamp(self, x: Tensor) -> Tensor:
        """``x.clamp_(min, max)``: in place, so a copy of the input is saved; backward needs two masks."""
        numel, itemsize = x.numel, x.itemsize
        before = self.new(numel, itemsize)

        def backward(grad: Tensor) -> list[Tensor | None]:
            masks = [self.new(numel, 1) for _ in range(2)]
            result = self.new(numel, itemsize)
            del masks
            return [result]

        return self.tape.record(x.view(), [x], [before], backward)

    def clamped(self, x: Tensor) -> Tensor:
        """``x.clamp(min, max)``: in new memory, with the input saved."""
        numel, itemsize = x.numel, x.itemsize

        def backward(grad: Tensor) -> list[Tensor | None]:
            mask = self.new(numel, 1)
            result = self.new(numel, itemsize)
            del mask
            return [result]

        return self.tape.record(self.new(numel, itemsize), [x], [x], backward)

    def square_mean(self, x: Tensor, rows: float) -> Tensor:
        """``x.pow(2).mean(-1)``, `rows` values."""
        numel, itemsize = x.numel, x.itemsize
        # pow's backward holds three tensors: the power, its multiple and the product.
        squared = self.elementwise(x, temporaries=2)
        out = self.new(rows, itemsize)
        return self.tape.record(out, [squared], [], lambda grad: [self.new(numel, itemsize)])

    def mean(self, x: Tensor, rows: float) -> Tensor:
        """``x.mean(-1)``, `rows` values."""
        numel, itemsize = x.numel, x.itemsize
        return self.tape.record(self.new(rows, itemsize), [x], [], lambda grad: [self.new(numel, itemsize)])

    def minus(self, a: Tensor, b: Tensor) -> Tensor:
        """``a - b`` of equal size: the second gradient is negated."""
        numel, itemsize = max(a.numel, b.numel), max(a.itemsize, b.itemsize)
        return self.tape.record(
            self.new(numel, itemsize), [a, b], [], lambda grad: [grad.view(), self.new(numel, itemsize)]
        )

    def less(self, x: Tensor, y: Tensor) -> Tensor:
        """``x - y`` with the smaller `y` broadcast: its gradient is negated at full size before it is summed."""
        numel, itemsize = x.numel, x.itemsize
        shapes = [(t.numel, t.itemsize) for t in (x, y)]
        return self.tape.record(
            self.new(numel, itemsize), [x, y], [], lambda grad: [grad.view(), self.new(numel, itemsize)], shapes
        )

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, statistics: float, mask: Tensor | None = None, *,
        numel: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Fused attention: saves its inputs, its result (of `numel` or the query's size) and `statistics` fp32 values.

        A boolean mask is converted to the query's dtype; the converted mask is saved too.
        """
        query, key, value = self.autocast(query), self.autocast(key), self.autocast(value)
        bias = mask
        if mask is not None and mask.itemsize != query.itemsize:
            bias = self.new(mask.numel, query.itemsize)
        sizes = [(t.numel, t.itemsize, t.requires_grad) for t in (query, key, value)]
        out = self.tape.product(query.numel if numel is None else numel, query.itemsize)
        logsumexp = self.tape.product(statistics, FP32)

        def backward(grad: Tensor) -> list[Tensor | None]:
            return [self.new(numel, itemsize) for numel, itemsize, _ in sizes]

        return self.tape.record(out, [query, key, value], [query, key, value, bias, out, logsumexp], backward)

    def dropout(self, x: Tensor) -> Tensor:
        """Dropout in training: CUDA keeps a byte mask, the CPU one of the input's dtype."""
        numel, itemsize = x.numel, x.itemsize
        mask = self.new(numel, 1 if self.tape.is_cuda else itemsize)
        return self.tape.record(self.new(numel, itemsize), [x], [mask], lambda grad: [self.new(numel, itemsize)])

    def matmul(
        self, a: Tensor, b: Tensor, numel: float, *, is_autocast: bool = True, is_scaled: bool = False
    ) -> Tensor:
        """A batched product with `numel` results; if it is scaled, gradients are scaled in separate memory."""
        if is_autocast:
            a, b = self.autocast(a), self.autocast(b)
        sizes = [(t.numel, t.itemsize, t.requires_grad) for t in (a, b)]

        def backward(grad: Tensor) -> list[Tensor | None]:
            # Torch's order: the second factor's gradient first.
            grads = []
            for size, itemsize, wanted in reversed(sizes):
                product = self.new(size, itemsize) if wanted else None
                grads.append(self.new(size, itemsize) if wanted and is_scaled else product)
                del product
            return grads[::-1]

        saved = [b if a.requires_grad else None, a if b.requires_grad else None]
        return self.tape.record(self.tape.product(numel, a.itemsize), [a, b], saved, backward)

    def softmax(self, x: Tensor, itemsize: int = FP32) -> Tensor:
        """Softmax in a given dtype, by default fp32 whatever the input's; its result is saved."""
        # The input lives as long as the call.
        converted = self.cast(x, itemsize)
        numel = x.numel
        out = self.new(numel, itemsize)
        return self.tape.record(out, [converted], [out], lambda grad: [self.new(numel, itemsize)])

    def layer_norm(self, x: Tensor, weight: Parameter | None, bias: Parameter | None, rows: float) -> Tensor:
        """torch's own layer norm: saves its input and two fp32 statistics per row; fp32 under CUDA's autocast."""
        if self.tape.autocast_bytes is not None and self.tape.is_cuda:
            x = self.cast(x, FP32)
        numel, itemsize, wanted = x.numel, x.itemsize, x.requires_grad
        # The CPU's statistics are of the weight's dtype.
        wide = FP32 if self.tape.is_cuda or weight is None else weight.itemsize
        out, statistics = self.new(numel, itemsize), self.new(2 * rows, wide)

        def backward(grad: Tensor) -> list[Tensor | None]:
            result = self.new(numel, itemsize) if wanted else None
            return [
                result,
                *[None if p is None or not p.trained else self.new(p.numel, p.itemsize) for p in (weight, bias)],
            ]

        return self.tape.record(out, [x, weight, bias], [x, statistics], backward)
