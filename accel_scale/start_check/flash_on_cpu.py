"""The attention that the twin runs on the CPU in place of the run's own, with the same masks from the same inputs.

Flash attention has no CPU kernel. Documents are separated not by the kernel but by its inputs from transformers: the
lengths that it reads from the positions or gets from the collator. So transformers' own code runs here up to the
kernel, which is replaced by a plain one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

# Module variables in which transformers keeps its loaded flash kernel (checked on 5.23;
# tests/unit/test_start_check.py fails when they move).
_KERNEL_VARIABLES = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_process_flash_kwargs_fn")


@dataclass(frozen=True)
class AttentionOnCpu:
    """Attention names for building and running the twin.

    Attributes:
        built_with: Name with which the model is built.
        runs_as: Name with which it runs.
    """

    built_with: str
    runs_as: str

    def switch_on(self, model: nn.Module) -> None:
        """Make the already built `model` run as `runs_as`."""
        if self.runs_as != self.built_with:
            for config in {id(c): c for m in model.modules() if (c := vars(m).get("config")) is not None}.values():
                config._attn_implementation_internal = self.runs_as


@contextlib.contextmanager
def attention_on_cpu(name: str) -> Iterator[AttentionOnCpu]:
    """The CPU's stand-in for attention `name`; inside, flash attention computes with plain matrix products.

    flex_attention has no backward pass on the CPU. sdpa replaces it, since its mask comes from the same function.
    """
    if name == "flex_attention":
        yield AttentionOnCpu("sdpa", "sdpa")
        return
    if "flash" not in name and "/" not in name:
        yield AttentionOnCpu(name, name)
        return
    from transformers import modeling_flash_attention_utils as flash

    runs_as = name if name.startswith("flash_attention_") else "flash_attention_2"
    kept = {variable: getattr(flash, variable) for variable in _KERNEL_VARIABLES}
    options = flash._lazy_define_process_function(_documents)
    for variable, value in zip(_KERNEL_VARIABLES, (runs_as, _batched, _documents, options), strict=True):
        setattr(flash, variable, value)
    try:
        yield AttentionOnCpu("eager", runs_as)
    finally:
        for variable, value in kept.items():
            setattr(flash, variable, value)


def _batched(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
    """Attention on (batch, length, heads, size), where every row is a document."""
    rows = zip(query, key, value, strict=True)
    return torch.stack([_attend(q, k, v, **options) for q, k, v in rows])


def _documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention on (tokens, heads, size) of documents delimited by the cumulative lengths."""
    parts = [cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), cu_seqlens_k.diff().tolist()]
    split = [tensor.split(lengths) for tensor, lengths in zip((q, k, v), parts, strict=True)]
    options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size}
    options |= {"softcap": softcap, "s_aux": s_aux}
    return torch.cat([_attend(*document, **options) for document in zip(*split, strict=True)])


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **ignored: Any,
) -> torch.Tensor:
    """Attention on (length, heads, size) of one document."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.repeat_interleave(group, 1).transpose(0, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ago = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None]
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(ago, dtype=torch.bool)
    hidden |= (ago > left) if left >= 0 else hidden
    hidden |= (-ago > right) if right >= 0 else hidden
    scores = scores.masked_fill(hidden, float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v.transpose(0, 1)).transpose(0, 1)
