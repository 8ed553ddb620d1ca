"""Head and loss on the tape: whole logits, this project's chunks, Liger's chunks, TRL's log-probabilities."""

from __future__ import annotations

import math

from accel_scale.facts.loss_chunks import CARD_LOGITS, CPU_LOGITS, HEAD_GRAD_IN_FORWARD_BYTES, chunk_tokens
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.families import Family
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tensors import Parameter, Tensor

# Number of chunks in torchtune's loss.
OUTPUT_CHUNKS = 8
# Constants of TRL 1.16, `trl.kernels.chunked_logprob` and `trl.trainer.utils`; a test compares them.
TILE_TOKENS = 4096
TILE_VOCABULARY = 32768
# fp32 values per token besides the tiles: seven running statistics, and the results.
_STATISTICS, _RESULTS = 7, 3
# Simultaneous fp32 copies of a tile if torch's operations fold it: logits, shifted logits and their exponentials, and
# the columns before the target. In the backward pass: logits (twice), log-probabilities, probabilities, gradient,
# difference to the target and product.
_FOLDED, _UNFOLDED = 3.25, 7.25


def scores_loss(ops: Ops, x: Tensor, weight: Parameter, num_scores: int) -> Tensor:
    """The loss of a reward model: scores are computed for every token, and the last one of each row counts."""
    scores = ops.linear(x, weight, num_scores, None)
    numel, itemsize = scores.numel, scores.itemsize
    return ops.tape.record(ops.new(1, FP32), [scores], [], lambda grad: [ops.new(numel, itemsize)])


def logits_loss(ops: Ops, setup: TrainingSetup, logits: Tensor) -> Tensor:
    """`accel_scale.optimization.head_loss.logits_loss` on logits that the model itself computed."""
    total, itemsize = logits.numel, logits.itemsize
    values = total - total / setup.sequence_length
    block = ops.new(values, itemsize) if setup.micro_batch_size > 1 else logits.view(values)
    block = ops.tape.record(block, [logits], [], lambda grad: [ops.new(total, itemsize)])
    return cross_entropy(ops, block)


def cross_entropy(ops: Ops, logits: Tensor) -> Tensor:
    """Cross-entropy in fp32: log-softmax, negative log-likelihood."""
    upcast = ops.cast(logits, FP32)
    numel = upcast.numel
    log_probs = ops.new(numel, FP32)
    ops.tape.record(log_probs, [upcast], [log_probs], lambda grad: [ops.new(numel, FP32)])
    return ops.tape.record(ops.new(1, FP32), [log_probs], [], lambda grad: [ops.new(numel, FP32)])


def parallel_cross_entropy(ops: Ops, logits: Tensor) -> Tensor:
    """The same on a share of the vocabulary, as in `torch.distributed.tensor.parallel.loss` (torch 2.5 to 2.13)."""
    upcast = ops.cast(logits, FP32)
    numel = upcast.numel
    shifted = ops.new(numel, FP32)
    exponentials = ops.new(numel, FP32)
    del exponentials
    log_probs = ops.new(numel, FP32)
    del shifted
    # The next operation's backward pass computes this one's, too.
    ops.tape.record(log_probs, [upcast], [log_probs], lambda grad: [grad.view()])

    def backward(grad: Tensor) -> list[Tensor | None]:
        targets, exponentials, total = (ops.new(numel, FP32) for _ in range(3))
        del exponentials
        result = ops.new(numel, FP32)
        del targets, total
        return [result]

    return ops.tape.record(ops.new(1, FP32), [log_probs], [log_probs], backward)


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
        if self.setup.loss in ("full", "full_compiled"):
            return self._whole(x)
        if self.setup.loss == "chunked_logits":
            return self._in_outputs(x)
        if self.setup.loss == "log_probs":
            return LogProbs(self.ops, self.model, self.setup, self.weight, self.bias)(x)
        return self._chunked(x)

    def _whole(self, x: Tensor) -> Tensor:
        """transformers' own loss: fp32 logits, log-softmax, negative log-likelihood."""
        ops = self.ops
        logits = ops.linear(x, self.weight, self.vocab, self.bias)
        del x
        if self.family.scales_logits:
            logits = ops.scale(logits)
        if self.model.logit_softcap:
            logits = ops.scale(logits)
            logits = ops.elementwise(logits, saves_input=False)
            logits = ops.scale(logits)
        if self.setup.loss == "full_compiled":
            return self._compiled(logits)
        return (cross_entropy if self.setup.parallel.stream_ranks == 1 else parallel_cross_entropy)(ops, logits)

    def _in_outputs(self, x: Tensor) -> Tensor:
        """torchtune's `CEWithChunkedOutputLoss`: all chunks of logits exist at once, and go to fp32 one by one."""
        ops, loss = self.ops, None
        parts = [ops.part(x, x.numel / OUTPUT_CHUNKS) for _ in range(OUTPUT_CHUNKS)]
        del x
        outputs = [ops.linear(part, self.weight, self.vocab, self.bias) for part in parts]
        parts.clear()
        for output in outputs:
            one = self._compiled(output) if self.setup.compile else cross_entropy(ops, output)
            loss = one if loss is None else ops.add(loss, one)
        assert loss is not None
        return loss

    def _compiled(self, logits: Tensor) -> Tensor:
        """Cast and loss in one kernel that keeps the logits in their dtype."""
        ops, numel, itemsize = self.ops, logits.numel, logits.itemsize
        return ops.tape.record(ops.new(1, FP32), [logits], [logits], lambda grad: [ops.new(numel, itemsize)])

    def _select(self, x: Tensor) -> Tensor:
        """All states but the last of each row, which predicts nothing; several rows are copied into one block."""
        ops, setup = self.ops, self.setup
        total, itemsize = x.numel, x.itemsize
        states = total - total / setup.sequence_length
        block = ops.new(states, itemsize) if setup.micro_batch_size > 1 else x.view(states)
        block = ops.tape.record(block, [x], [], lambda grad: [ops.new(total, itemsize)])
        if not setup.is_padded:
            return block
        # Tokens without a label are left out.
        labelled = states * ((setup.mean_length or 0) - 1) / (setup.sequence_length - 1)
        return ops.custom([block], labelled, itemsize, [], lambda grad: [ops.new(states, itemsize)])

    def _chunked(self, x: Tensor) -> Tensor:
        """`chunked_cross_entropy`, or Liger's: computes gradients of hidden states in the forward pass."""
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
        """Go through the chunks; returns the head's gradient, if wanted. A chunk's tensors outlive its turn."""
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
        """Tokens of each chunk; if there are many full ones, three stand for all."""
        if self.setup.loss == "liger":
            size = 2.0 ** math.ceil(math.log2(max(tokens / math.ceil(self.vocab / self.model.hidden_size), 1)))
        else:
            on_card = CARD_LOGITS if self.weight.trained else self.setup.chunk_logits
            logits = on_card if self.ops.tape.is_cuda else CPU_LOGITS
            size = chunk_tokens(logits, self.model.vocab_size, long_rows=self.setup.long_rows)
        full, rest = divmod(tokens, size)
        return [size] * min(int(full), 3) + ([rest] if rest else [])

    def _transformed(self, raw: Tensor) -> Tensor:
        ops, logits = self.ops, raw
        # This project's loss skips a factor of 1; transformers divides by it.
        if self.family.scales_logits and self.model.layer_variant != "unscaled":
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
        """Gradient of the raw logits, written over the probabilities, in the compute dtype."""
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


class LogProbs:
    """Like `Head`, for TRL's head for preferences and rewards: log-probabilities of tokens, with logits in tiles.

    A tile has full width whatever the vocabulary; the backward pass recomputes each and sums gradients in fp32. On
    CUDA, a kernel folds a tile in place and scores only labelled tokens; elsewhere torch folds it and scores all.
    """

    def __init__(
        self, ops: Ops, model: ModelFacts, setup: TrainingSetup, weight: Parameter, bias: Parameter | None
    ) -> None:
        self.ops, self.model, self.setup, self.weight, self.bias = ops, model, setup, weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        ops = self.ops
        x = self._scored(x)
        tokens = x.numel / self.model.hidden_size
        compute = ops.tape.autocast_bytes or x.itemsize
        statistics = ops.new(tokens * _STATISTICS, FP32)
        self._tiles(tokens, compute, x.itemsize, _FOLDED)
        results = ops.new(tokens * _RESULTS, FP32)
        del statistics
        wants_hidden, weight, bias = x.requires_grad, self.weight, self.bias
        numel, itemsize = x.numel, x.itemsize

        def backward(grad: Tensor) -> list[Tensor | None]:
            hidden = ops.new(numel, FP32) if wants_hidden else None
            head = ops.new(weight.numel, FP32) if weight.trained else None
            self._tiles(tokens, compute, itemsize, _UNFOLDED, sums=hidden is not None, sums_head=head is not None)
            offset = ops.new(bias.numel, bias.itemsize) if bias is not None and bias.trained else None
            if hidden is not None and itemsize != FP32:
                hidden = ops.new(numel, itemsize)
            if head is not None and weight.itemsize != FP32:
                head = ops.new(weight.numel, weight.itemsize)
            return [hidden, head, offset]

        return ops.tape.record(ops.new(1, FP32), [x, weight, bias], [x, results], backward)

    def _scored(self, x: Tensor) -> Tensor:
        """Hidden states of the scored tokens, in one block; the last of a row predicts nothing."""
        ops, setup = self.ops, self.setup
        total, itemsize = x.numel, x.itemsize
        states = total - total / setup.sequence_length
        if not ops.tape.is_cuda:
            block = ops.new(states, itemsize) if setup.micro_batch_size > 1 else x.view(states)
            return ops.tape.record(block, [x], [], lambda grad: [ops.new(total, itemsize)])
        labelled = states
        if setup.generation is not None:
            rows = setup.micro_batch_size / setup.parallel.sequence_parallel
            labelled = rows * setup.generation.completion_length * self.model.hidden_size
        inner = ops.tape.record(x.view(states), [x], [], lambda grad: [ops.new(total, itemsize)])
        return ops.custom([inner], min(labelled, states), itemsize, [], lambda grad: [ops.new(states, itemsize)])

    def _tiles(
        self, tokens: float, compute: int, itemsize: int, copies: float, *, sums: bool = False, sums_head: bool = False
    ) -> None:
        """Allocate the largest tile with its temporaries, and free them again."""
        ops, hidden = self.ops, self.model.hidden_size
        rows, columns = min(tokens, TILE_TOKENS), min(self.model.vocab_size, TILE_VOCABULARY)
        buffer = ops.new(rows * TILE_VOCABULARY, compute)
        states = ops.new(rows * hidden, compute) if compute != itemsize else None
        weight = ops.new(columns * hidden, compute) if compute != self.weight.itemsize else None
        if not ops.tape.is_cuda:
            folded = ops.new(rows * columns * copies, FP32)
            del folded
        is_narrow = compute != FP32 and not ops.tape.is_cuda
        if is_narrow and sums:
            wide = [ops.new(rows * columns, FP32), ops.new(columns * hidden, FP32)]
            del wide
        if is_narrow and sums_head:
            wide = [ops.new(rows * columns, FP32), ops.new(rows * hidden, FP32)]
            del wide
        del buffer, states, weight
