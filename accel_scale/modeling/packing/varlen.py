"""Variable-length attention: all documents of all rows in one kernel, without padding, buckets or a mask.

torch has it in `torch.nn.attention.varlen`, on the flash kernels that SDPA uses: half precision, no dropout, head
sizes up to 256, any window, groups of query heads. It plans nothing per shape, so lengths may vary freely.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional as F

try:  # at the top: torch.compile breaks a layer's graph at an import
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from accel_scale.facts.device import Device

# Its flash kernel requires head sizes that are multiples of this.
_HEAD_MULTIPLE = 8


def varlen_refusal(
    device: Device, *, dtype: torch.dtype, key_size: int, value_size: int, dropout: float
) -> str | None:
    """The reason why the kernel does not support such heads on `device`; None if it does."""
    if not device.has_flash_kernel:
        return f"{device.name} has no flash kernel in torch"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in fp16 or bf16, not in {str(dtype).removeprefix('torch.')}"
    if (refusal := device.flash_head_refusal(key_size, value_size)) is not None:
        return refusal
    if dropout:
        return "it has no dropout"
    return None if _has_kernel() else f"torch {torch.__version__} has no attention of variable length"


def _has_kernel() -> bool:
    """True if this version of torch has it with windows and groups of heads (checked on 2.13)."""
    if varlen_attn is None:
        return False
    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    *,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention within documents. (tokens, heads, head size) in and out; keys may have fewer heads.

    Args:
        bounds: Start of each document, and the end. (documents + 1,)
        longest: Tokens of the longest document.
        window: Number of latest tokens that a query sees, including itself; None: its whole document.
    """
    kernel = cast(Callable[..., torch.Tensor], varlen_attn)  # returns sums only on request
    size = query.shape[-1]
    missing = -size % _HEAD_MULTIPLE
    if missing:  # zeros add nothing to a product, and give zeros that are cut off again
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    output = kernel(
        *(_with_dense_heads(tensor) for tensor in (query, key, value)),
        bounds,
        bounds,
        longest,
        longest,
        scale=size**-0.5 if scaling is None else scaling,
        # The kernel counts the tokens to the left of the query's own.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output[..., :size] if missing else output


def _with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
