"""Head and loss on the tape: whole logits, this project's chunks, Liger's chunks."""

from __future__ import annotations

import math

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.families import Family
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tables import is_padded
from accel_scale.planning.tape.tensors import Parameter, Tensor

# The figures of accel_scale.optimization.loss; a test compares them.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}
LONG_ROWS_LOGITS = 2**26
HEAD_GRAD_IN_FORWARD_BYTES = 256 * 2**20


class Head:
    """Call it with the last normalised hidden states; the result is the scalar loss."""

    def __init__(
        self, ops: Ops, model: ModelFacts, family: Family, setup: TrainingSetup, weight: Parameter,
        bias: Parameter | None,
    ) -> None:  # fmt: skip
        self.ops, self.model, self.family, self.setup = ops, model, family, setup
        self.weight, self.bias = weight, bias
        self.vocab = model.vocab_size

    def __call__(self, x: Tensor) -> Tensor:
        if self.setup.loss == "full":
            return self._whole(x)
        return self._chunked(x)

    def _whole(self, x: Tensor) -> Tensor:
        """transformers' own loss: logits, in fp32, log-softmax, negative log-likelihood."""
        ops = self.ops
        logits = ops.linear(x, self.weight, self.vocab, self.bias)
        del x
        if self.family.scales_logits:
            logits = ops.scale(logits)
        if self.model.logit_softcap:
            logits = ops.scale(logits)
            logits = ops.elementwise(logits, saves_input=False)
            logits = ops.scale(logits)
        upcast = ops.cast(logits, FP32)
        numel = upcast.numel
        log_probs = ops.new(numel, FP32)
        ops.tape.record(log_probs, [upcast], [log_probs], lambda grad: [ops.new(numel, FP32)])
        return ops.tape.record(ops.new(1, FP32), [log_probs], [], lambda grad: [ops.new(numel, FP32)])

    def _select(self, x: Tensor) -> Tensor:
        """All states but each row's last, which predicts nothing; several rows are copied into one block."""
        ops, setup = self.ops, self.setup
        total, itemsize = x.numel, x.itemsize
        states = total - total / setup.sequence_length
        block = ops.new(states, itemsize) if setup.micro_batch_size > 1 else x.view(states)
        block = ops.tape.record(block, [x], [], lambda grad: [ops.new(total, itemsize)])
        if not is_padded(setup):
            return block
        # Tokens without a label are left out.
        labelled = states * ((setup.mean_length or 0) - 1) / (setup.sequence_length - 1)
        return ops.custom([block], labelled, itemsize, [], lambda grad: [ops.new(states, itemsize)])

    def _chunked(self, x: Tensor) -> Tensor:
        """`chunked_cross_entropy`, or Liger's: gradients of hidden states in the forward pass."""
        ops, weight = self.ops, self.weight
        x = self._select(x)
        tokens = x.numel / self.model.hidden_size
        compute = self.setup.compute_bytes if self.setup.autocast else max(x.itemsize, weight.itemsize)
        in_forward = self.setup.loss == "liger" or weight.numel * FP32 <= HEAD_GRAD_IN_FORWARD_BYTES
        hidden_grad = ops.new(x.numel, x.itemsize) if x.requires_grad else None
        wants_weight = weight.trained
        weight_grad = self._chunks(x, tokens, compute, wants_weight and in_forward, hidden_grad is not None)
        held = [hidden_grad, weight_grad]
        del hidden_grad, weight_grad
        source = x.view() if wants_weight and not in_forward else None
        saved = [source]

        def backward(grad: Tensor) -> list[Tensor | None]:
            # Gradients made in the forward pass leave the context with this call.
            hidden, head = held
            held.clear()
            if wants_weight and not in_forward:
                head = self._chunks(source, tokens, compute, True, False)  # type: ignore[arg-type]
            if head is not None and head.itemsize != weight.itemsize:
                head = ops.new(weight.numel, weight.itemsize)
            bias = self.bias
            return [hidden, head, ops.new(bias.numel, bias.itemsize) if bias is not None and bias.trained else None]

        return ops.tape.record(ops.new(1, FP32), [x, weight, self.bias], saved, backward)

    def _chunks(self, x: Tensor, tokens: float, compute: int, wants_weight: bool, wants_hidden: bool) -> Tensor | None:
        """Go through the chunks; the head's gradient, if it is wanted. A chunk's tensors outlast its turn."""
        ops, vocab, hidden = self.ops, self.vocab, self.model.hidden_size
        weight = ops.new(self.weight.numel, compute) if compute != self.weight.itemsize else None
        total = chunk = raw = logits = probs = grad = states = None
        for rows in self._chunk_sizes(tokens):
            chunk = ops.new(rows * hidden, compute) if compute != x.itemsize else None
            raw = ops.new(rows * vocab, compute)
            logits = self._transformed(raw)
            probs = self._log_softmax(logits)
            grad = self._grad(probs, raw, compute)
            if wants_hidden:
                states = ops.new(rows * hidden, compute)
                del states
            if wants_weight:
                total = self._add_weight_grad(total, compute)
        del weight, chunk, raw, logits, probs, grad
        return total

    def _chunk_sizes(self, tokens: float) -> list[float]:
        """Tokens of the chunks; of many full ones, three stand for all."""
        if self.setup.loss == "liger":
            size = 2.0 ** math.ceil(math.log2(max(tokens / math.ceil(self.vocab / self.model.hidden_size), 1)))
        else:
            most = CHUNK_LOGITS["cuda" if self.ops.tape.is_cuda else "cpu"]
            most = min(most, LONG_ROWS_LOGITS) if self.setup.long_rows else most
            size = max(64, most // self.model.vocab_size)
        full, rest = divmod(tokens, size)
        return [size] * min(int(full), 3) + ([rest] if rest else [])

    def _transformed(self, raw: Tensor) -> Tensor:
        ops, logits = self.ops, raw
        if self.family.scales_logits:
            logits = ops.new(raw.numel, raw.itemsize)
        if self.model.logit_softcap:
            capped = self._tanh(logits)
            logits = ops.new(raw.numel, FP32)
            del capped
        return logits

    def _tanh(self, x: Tensor) -> Tensor:
        """``tanh(x.float() / cap)``."""
        ops = self.ops
        wide = x if x.itemsize == FP32 else ops.new(x.numel, FP32)
        divided = ops.new(x.numel, FP32)
        del wide
        return ops.new(divided.numel, FP32)

    def _log_softmax(self, logits: Tensor) -> Tensor:
        converted = logits if logits.itemsize == FP32 else self.ops.new(logits.numel, FP32)
        result = self.ops.new(logits.numel, FP32)
        del converted
        return result

    def _grad(self, probs: Tensor, raw: Tensor, compute: int) -> Tensor:
        """Gradient of the raw logits, written over the probabilities, in the compute type."""
        ops = self.ops
        if self.model.logit_softcap:
            squared = self._tanh(raw)
            derivative = ops.new(raw.numel, FP32)
            del squared, derivative
        return probs if compute == FP32 else ops.new(raw.numel, compute)

    def _add_weight_grad(self, total: Tensor | None, compute: int) -> Tensor:
        product = self.ops.new(self.weight.numel, compute)
        if total is None:
            return product
        return total if total.itemsize == FP32 else self.ops.new(self.weight.numel, FP32)
