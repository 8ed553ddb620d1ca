"""Cross-entropy of a language model's head in chunks of tokens, without the (tokens, vocabulary) logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from accel_scale.errors import ConfigError
from accel_scale.facts.loss_chunks import (
    CARD_LOGITS,
    CPU_LOGITS,
    HEAD_GRAD_IN_FORWARD_BYTES,
    card_logits,
    chunk_tokens,
)

if TYPE_CHECKING:
    from accel_scale.optimization.vocabulary_parallel import VocabularyShard

IGNORED_LABEL = -100


def default_chunk_size(vocab_size: int, device: torch.device, *, is_trained: bool, long_rows: bool = False) -> int:
    """Tokens per chunk; at least 64.

    The logits of a frozen head stay within a share of the device memory, and are fewer with `long_rows`.
    """
    return chunk_tokens(_logits_at_once(device, is_trained), vocab_size, long_rows=long_rows)


def _logits_at_once(device: torch.device, is_trained: bool) -> int:
    if device.type == "cuda" and not is_trained:
        share = torch.cuda.get_per_process_memory_fraction(device)  # the share of the card left by --device_memory
        return card_logits(share * torch.cuda.get_device_properties(device).total_memory)
    return CPU_LOGITS if device.type == "cpu" else CARD_LOGITS


def chunked_cross_entropy(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_size: int | None = None,
    num_items: torch.Tensor | int | float | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    shift: bool = True,
    return_num_correct: bool = False,
    vocabulary: VocabularyShard | None = None,
    num_labels: int | None = None,
) -> Any:
    """Token-weighted cross-entropy: the sum over labelled tokens ÷ `num_items`.

    Only tokens with a label are projected, one chunk at a time, and gradients are computed in the same pass, so only
    one chunk's logits exist at a time. Under autocast the products run in its dtype; the softmax and the sums are
    fp32.

    Args:
        hidden: Last hidden states. (batch, length, hidden size), or (tokens, hidden size) with ``shift=False``.
        lm_head_weight: (vocabulary, hidden size).
        labels: Token ids, -100 for tokens without a loss. Same shape as `hidden` without its last dimension.
        chunk_size: Tokens per chunk; None chooses it such that the chunk's logits stay within a fixed size.
        num_items: Divisor of the sum. For gradient accumulation and several ranks: the number of labelled tokens in
            the global batch, see `count_loss_tokens`. None: those in `labels`.
        bias: Bias of the head. (vocabulary,)
        softcap: Logits become ``softcap · tanh(logits / softcap)``, after scaling, as in Gemma.
        logit_scale: Factor on the logits.
        shift: True if the state at position i predicts the label at i + 1 (otherwise the label at i).
        return_num_correct: Also return how many labels are the most likely token of their distribution.
        vocabulary: Under tensor parallelism, the rows of the head held by `lm_head_weight` and `bias`; the loss and
            the hidden states' gradient are then the same on all its ranks. None: all rows.
        num_labels: Number of labels that count, if the host knows it; None asks the device and waits. A wrong number
            makes the loss NaN, because tokens would be lost or counted twice.

    Returns:
        The loss, an fp32 scalar; with `return_num_correct`, a pair of the loss and an integer scalar.

    Raises:
        ConfigError: if `chunk_size` is not positive.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk_size={chunk_size} is not positive.", place="chunk_size", fix="use 1 or more.")
    if shift:
        hidden, labels = hidden[..., :-1, :], labels[..., 1:]
    tokens, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    is_labelled = targets != IGNORED_LABEL
    if num_labels != targets.numel():
        # The number of labelled tokens determines the shapes: a synchronisation unless it has been counted.
        found = is_labelled.nonzero() if num_labels is None else is_labelled.nonzero_static(size=num_labels)
        if found.shape[0] < targets.numel():
            kept = found.squeeze(-1).clamp(min=0)
            tokens, targets = tokens.index_select(0, kept), targets[kept]
    if num_labels is not None:
        targets = targets.clamp(min=0)  # a wrong number is handled below
    size = chunk_size or default_chunk_size(
        lm_head_weight.shape[0], hidden.device, is_trained=lm_head_weight.requires_grad
    )
    # Not only `needs_input_grad`: that is true for the head's weight even if no gradient is wanted.
    with_grad = torch.is_grad_enabled()
    options = (size, softcap, logit_scale, return_num_correct, with_grad, vocabulary)
    total, num_correct = _summed(tokens, lm_head_weight, bias, targets, options)
    # Without any labelled token the loss is a finite, differentiable zero.
    loss = total / at_least_one(targets.numel() if num_items is None else num_items, total.device)
    if num_labels is not None:  # compared on the device, so nothing waits
        loss = loss.masked_fill(is_labelled.sum() != num_labels, torch.nan)
    return (loss, num_correct) if return_num_correct else loss


# torch.compile before torch 2.13 traces it into gradients of zero (seen on 2.11).
@torch.compiler.disable
def _summed(*inputs: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _ChunkedCrossEntropy.apply(*inputs)


def at_least_one(count: torch.Tensor | int | float, device: torch.device) -> torch.Tensor | int | float:
    """`count` for a division on `device`; a host number stays on the host, because copying it would wait."""
    return count.to(device).clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def on_device(count: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """`count` as a tensor on `device`; a host number is written there by a fill, because copying it would wait."""
    if isinstance(count, torch.Tensor):
        return count.to(device)
    return torch.full((), count, dtype=torch.long, device=device)


def count_loss_tokens(labels: torch.Tensor, *, shift: bool = True) -> torch.Tensor:
    """Number of labelled tokens in `labels`, an integer scalar on its device; a row's first token has no predictor."""
    return (labels[..., 1:] if shift else labels).ne(IGNORED_LABEL).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the tokens' cross-entropies; computes gradients in the forward pass, a large head's in the backward.

    Computing gradients in the forward pass saves the second projection of a recomputing backward pass (three matrix
    products instead of four); the incoming gradient is a scalar and is multiplied in later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: tuple[int, float | None, float, bool, bool, VocabularyShard | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunk_size, softcap, logit_scale, want_correct, with_grad, vocabulary = options
        needs_hidden, needs_weight, needs_bias = (need and with_grad for need in ctx.needs_input_grad[:3])
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            compute_dtype = torch.get_autocast_dtype(device_type)
        else:
            compute_dtype = torch.promote_types(hidden.dtype, weight.dtype)
        head_in_forward = weight.numel() * 4 <= HEAD_GRAD_IN_FORWARD_BYTES
        head = _Head(weight, bias, compute_dtype, softcap, logit_scale, vocabulary)
        grads = _HeadGrads(head, needs_weight and head_in_forward, needs_bias and head_in_forward)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        num_correct = torch.zeros((), dtype=torch.long, device=hidden.device)
        with torch.autocast(device_type, enabled=False):
            for begin in range(0, hidden.shape[0], chunk_size):
                chunk = hidden[begin : begin + chunk_size].to(compute_dtype)
                target = targets[begin : begin + chunk_size, None]
                raw = head.logits(chunk)
                logits = head.transform(raw)
                if want_correct:
                    num_correct += head.count_correct(logits, target)
                log_probs, target_log_probs = head.log_softmax(logits, target)
                total -= target_log_probs.sum()
                if needs_hidden or grads.is_wanted:
                    grad = head.grad_logits(log_probs, target, raw)
                    if grad_hidden is not None:
                        grad_hidden[begin : begin + chunk_size] = grad @ head.weight
                    grads.add(grad, chunk)
        ctx.options, ctx.compute_dtype = options, compute_dtype
        ctx.in_forward = (grad_hidden, grads.weight, grads.bias)
        is_later = (needs_weight or needs_bias) and not head_in_forward
        ctx.is_later = is_later
        if is_later:
            ctx.save_for_backward(hidden, weight, bias, targets)
        return total, num_correct

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_outputs[0]
        if ctx.in_forward is None:
            raise RuntimeError("The gradients of chunked_cross_entropy are used up by the first backward pass.")
        grad_hidden, grad_weight, grad_bias = ctx.in_forward
        ctx.in_forward = None
        if grad_hidden is not None and ctx.options[-1] is not None:
            grad_hidden = ctx.options[-1].sum(grad_hidden)
        if ctx.is_later:
            grad_weight, grad_bias = _head_grads_later(ctx)
        scaled = [None if grad is None else grad.mul_(scale) for grad in (grad_hidden, grad_weight, grad_bias)]
        return (*scaled, None, None)


class _Head:
    """The projection to logits and its derivative."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype,
        softcap: float | None,
        logit_scale: float,
        vocabulary: VocabularyShard | None,
    ) -> None:
        self.parameter, self.bias_parameter = weight, bias
        self.weight = weight.detach().to(compute_dtype)
        self.bias = None if bias is None else bias.detach().to(compute_dtype)
        self.softcap, self.logit_scale, self.vocabulary = softcap, logit_scale, vocabulary

    def logits(self, chunk: torch.Tensor) -> torch.Tensor:
        return F.linear(chunk, self.weight, self.bias)

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits.float() / self.softcap)

    def log_softmax(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 log-probabilities of the tokens held here, and of the targets."""
        if self.vocabulary is not None:
            return self.vocabulary.log_softmax(logits, target)
        log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
        return log_probs, log_probs.gather(1, target)

    def count_correct(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.vocabulary is not None:
            return self.vocabulary.count_correct(logits, target)
        return (logits.argmax(-1, keepdim=True) == target).sum()

    def grad_logits(self, log_probs: torch.Tensor, target: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Gradient of the summed loss with respect to the raw logits, in the compute dtype; overwrites `log_probs`."""
        grad = log_probs.exp_()
        if self.vocabulary is not None:
            self.vocabulary.add_to_targets(grad, target, -1.0)
        else:
            grad.scatter_add_(1, target, grad.new_full((), -1.0).expand_as(target))
        if self.softcap is not None:
            grad.mul_(1 - torch.tanh(raw.float() * (self.logit_scale / self.softcap)).square_())
        if self.logit_scale != 1.0:
            grad.mul_(self.logit_scale)
        return grad.to(self.weight.dtype)


class _HeadGrads:
    """Sums the head's gradients over chunks; in fp32 if there is more than one."""

    def __init__(self, head: _Head, needs_weight: bool, needs_bias: bool) -> None:
        self.head, self.needs_weight, self.needs_bias = head, needs_weight, needs_bias
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    @property
    def is_wanted(self) -> bool:
        return self.needs_weight or self.needs_bias

    @property
    def weight(self) -> torch.Tensor | None:
        parameter = self.head.parameter
        return torch.zeros_like(parameter) if self.needs_weight and self._weight is None else self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        parameter = self.head.bias_parameter
        is_missing = self.needs_bias and self._bias is None
        return torch.zeros_like(parameter) if is_missing and parameter is not None else self._bias

    def add(self, grad: torch.Tensor, chunk: torch.Tensor) -> None:
        if self.needs_weight:
            product = grad.t() @ chunk
            self._weight = product if self._weight is None else self._weight.float().add_(product)
        if self.needs_bias:
            product = grad.sum(0, dtype=torch.float32)
            self._bias = product if self._bias is None else self._bias.add_(product)


def _head_grads_later(ctx: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The head's gradients, from recomputed logits. Under ZeRO-3 the head is gathered again for it."""
    hidden, weight, bias, targets = ctx.saved_tensors
    chunk_size, softcap, logit_scale, _, _, vocabulary = ctx.options
    with gathered_head(weight, bias), torch.autocast(hidden.device.type, enabled=False):
        head = _Head(weight, bias, ctx.compute_dtype, softcap, logit_scale, vocabulary)
        grads = _HeadGrads(head, ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        for begin in range(0, hidden.shape[0], chunk_size):
            chunk = hidden[begin : begin + chunk_size].to(ctx.compute_dtype)
            raw = head.logits(chunk)
            target = targets[begin : begin + chunk_size, None]
            log_probs, _ = head.log_softmax(head.transform(raw), target)
            grads.add(head.grad_logits(log_probs, target, raw), chunk)
        return grads.weight, grads.bias


def gathered_head(*parameters: Any) -> Any:
    """A context in which ZeRO-3's shards of `parameters` are whole; does nothing otherwise."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    return maybe_gather_lm_head_ctx(*parameters)
