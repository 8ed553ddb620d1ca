"""The loss from a model's last hidden states or from its own logits, with the factor and cap in its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from accel_scale.optimization.loss import (
    IGNORED_LABEL,
    at_least_one,
    chunked_cross_entropy,
    default_chunk_size,
    gathered_head,
)
from accel_scale.optimization.vocabulary_parallel import held_head


def head_loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> Any:
    """Apply `chunked_cross_entropy` to final hidden states (batch, length, hidden size) with the head of `model`.

    Args:
        model: Supplies its output embeddings and configuration; its forward is not called.
        options: Options of `chunked_cross_entropy`.
    """
    # Looked up at each call, because FSDP2 and PEFT replace modules.
    head = model.get_output_embeddings()
    weight, bias, vocabulary = held_head(head.weight, getattr(head, "bias", None))
    softcap, logit_scale = head_transform(model.config)
    transform = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "vocabulary": vocabulary}
    with gathered_head(weight, bias):
        hidden, labels = hidden.to(weight.device), labels.to(weight.device)
        is_long = getattr(model, "_has_long_rows", False)
        size = default_chunk_size(weight.shape[0], weight.device, is_trained=weight.requires_grad, long_rows=is_long)
        return chunked_cross_entropy(hidden, weight, labels, chunk_size=size, **transform, **options)


def logits_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, num_items: Any = None, shift: bool = True, return_num_correct: bool
) -> Any:
    """The result of `chunked_cross_entropy`, from existing logits (batch, length, vocabulary)."""
    labels = labels.to(logits.device)
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    is_labelled = labels.ne(IGNORED_LABEL)
    loss = total / at_least_one(is_labelled.sum() if num_items is None else num_items, total.device)
    return (loss, (logits.argmax(-1).eq(labels) & is_labelled).sum()) if return_num_correct else loss


def head_transform(config: Any) -> tuple[float | None, float]:
    """The (softcap, factor) that a model's own forward applies to its logits, under the names used by configurations.

    Cohere has `logit_scale`, Muse `output_multiplier`, Falcon-H1 `lm_head_multiplier`; Granite and MiniCPM divide by
    `logits_scaling`, HyperCLOVA X multiplies by it; Gemma caps by `final_logit_softcapping`.
    """
    text_config = config.get_text_config()
    scale = None
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(text_config, name, None) if scale is None else scale
    scaling = getattr(text_config, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if text_config.model_type == "hyperclovax" else 1 / scaling
    return getattr(text_config, "final_logit_softcapping", None), 1.0 if scale is None else scale
