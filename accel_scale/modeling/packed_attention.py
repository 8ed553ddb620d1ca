"""Attention over packed documents that computes only the non-empty blocks of the mask.

A packed row of 2048 tokens with documents of 60 has a mask that is 97% zero; masked SDPA computes all of it. If torch
has a variable-length kernel for the device, it computes the documents in place. Otherwise they are gathered into a few
buckets of similar length, each bucket is an ordinary causal batch, and the outputs are scattered back: the same
numbers, without the empty blocks. Registered with transformers as `PACKED_ATTENTION`, it works for every model that
uses transformers' attention interface.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from accel_scale.facts.device import PACKED_ATTENTION, Device
from accel_scale.launching.machine import detect_device
from accel_scale.modeling.packed_mask import PackedLayout, dense_mask, packed_mask
from accel_scale.modeling.packing.varlen import varlen_attention, varlen_refusal

# The CPU's flash kernel is built for long rows and multiplies small blocks, where oneDNN is slow. Up to this length
# two matrix products and a softmax are faster in bf16, and in fp32 where oneDNN multiplies: up to several times, for
# head sizes 16 to 128 on a CPU with AVX512-BF16. In fp32 with MKL the kernel wins.
_SHORT_LENGTH = 512
# Compiled, queries in blocks of this length skip most keys that they must not see.
_COMPILED_BLOCK = 128


def register_packed_attention() -> str:
    """Register `PACKED_ATTENTION` with transformers (repeating it is harmless) and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
    AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)
    return PACKED_ATTENTION


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (batch, heads, length, head size) in, (batch, length, heads, head size) out.

    Anything other than causal attention within documents (a cache, a position bias, a dense mask) goes to
    transformers' SDPA with the mask it needs.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layout: PackedLayout | None = getattr(attention_mask, "packed_layout", None)
    if layout is None and attention_mask is not None and attention_mask.ndim == 2:
        raise RuntimeError(f"{type(module).__name__} copied the packed mask and lost its layout.")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    is_plain = (
        kwargs.get("position_bias") is None
        and kwargs.get("cache") is None
        and kwargs.get("softcap") is None
        and causal
        and query.shape[2] == key.shape[2]
    )
    if is_plain:
        query, key, value = in_autocast_dtype(query, key, value)
        with torch.autocast(query.device.type, enabled=False):
            if layout is not None:
                return _attend_packed(query, key, value, layout, dropout, scaling), None
            if attention_mask is None:
                q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
                attend = _attend_short if _is_short(query, query.shape[2]) else _attend_fused
                return attend(q, k, v, None, dropout, scaling), None
    if layout is not None:
        attention_mask = dense_mask(layout)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
    )


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast `tensors` to autocast's dtype for attention: rotary embeddings leave queries and keys in fp32."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    batch_size, num_heads, length, _ = query.shape
    if _is_varlen(query.device.type, query.dtype, query.shape[-1], value.shape[-1], dropout):
        q, k, v = (_tokens_first(tensor) for tensor in (query, key, value))
        tokens = varlen_attention(q, k, v, layout.bounds, layout.longest, window=layout.window, scaling=scaling)
    else:
        tokens = _attend_buckets((query, key, value), layout, dropout, scaling)
    return tokens.view(batch_size, length, num_heads, value.shape[-1])


# Compiled, it would be compiled again for the buckets of every micro-batch.
@torch.compiler.disable
def _attend_buckets(
    tensors: tuple[torch.Tensor, ...], layout: PackedLayout, dropout: float, scaling: float | None
) -> torch.Tensor:
    """Queries, keys and values, each (batch, heads, length, size), in; (tokens, heads, size) out."""
    sizes = [num_documents * padded for num_documents, padded in layout.buckets]
    # One node for all buckets of a tensor: slices would each produce a gradient as long as the whole, to be added up.
    slots = [_ToSlots.apply(_tokens_first(tensor), layout).split(sizes) for tensor in tensors]
    outputs = []
    for (num_documents, padded), *parts in zip(layout.buckets, *slots, strict=True):
        q, k, v = (part.unflatten(0, (num_documents, padded)) for part in parts)
        attend = _attend_short if _is_short(tensors[0], padded) else _attend_fused
        window = layout.window if layout.window is not None and layout.window < padded else None
        outputs.append(attend(q, k, v, window, dropout, scaling).flatten(0, 1))
    return _FromSlots.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], layout)


# Constants to torch.compile, which would otherwise break every layer's graph at the device queries.
@torch.compiler.assume_constant_result
def _is_varlen(device_type: str, dtype: torch.dtype, key_size: int, value_size: int, dropout: float) -> bool:
    sizes = {"key_size": key_size, "value_size": value_size}
    return varlen_refusal(_device(device_type), dtype=dtype, dropout=dropout, **sizes) is None


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, heads, length, size) to (batch · length, heads, size); a view if the projections allow it."""
    return tensor.transpose(1, 2).flatten(0, 1)


class _ToSlots(torch.autograd.Function):
    """(tokens, heads, size) to (slots, heads, size). Each token has one slot, so backward is also a gather."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.layout.slot_of_token), None


class _FromSlots(torch.autograd.Function):
    """(slots, heads, size) to (tokens, heads, size); padding slots get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        ctx.layout = layout
        return slots.index_select(0, layout.slot_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].index_select(0, ctx.layout.token_of_slot)
        return grad.index_fill_(0, ctx.layout.padding_slots, 0), None


def _is_short(query: torch.Tensor, length: int) -> bool:
    if query.device.type != "cpu" or length > _SHORT_LENGTH:
        return False
    return query.dtype == torch.bfloat16 or (query.dtype == torch.float32 and _is_fp32_in_onednn())


@torch.compiler.assume_constant_result
def _is_fp32_in_onednn() -> bool:
    return torch.get_float32_matmul_precision() == "medium"


def _attend_fused(q: Any, k: Any, v: Any, window: int | None, dropout: float, scaling: float | None) -> torch.Tensor:
    """Causal SDPA on (documents, length, heads, size)."""
    mask = None if window is None else _band(q.shape[1], window, q.device)
    group = q.shape[2] // k.shape[2]
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_shared = _shares_key_heads(q.device.type, is_half, mask is not None, k.shape[-1], v.shape[-1])
    if group > 1 and not is_shared:
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=group > 1 and is_shared,
    )
    return output.transpose(1, 2)


@torch.compiler.assume_constant_result
def _shares_key_heads(device_type: str, is_half: bool, is_masked: bool, key_size: int, value_size: int) -> bool:
    return _device(device_type).shares_key_heads(
        half=is_half, masked=is_masked, key_size=key_size, value_size=value_size
    )


@functools.cache
def _device(device_type: str) -> Device:
    return detect_device(device_type)


def _attend_short(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, dropout: float, scaling: float | None
) -> torch.Tensor:
    """The same by two matrix products and a softmax; the queries of a group share their key head's product."""
    num_documents, length, num_heads, size = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    q = q.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k = k.transpose(1, 2).reshape(-1, length, size)
    v = v.transpose(1, 2).reshape(-1, length, v.shape[-1])
    bias = _bias(length, window, group, q.dtype, q.device)
    scale = size**-0.5 if scaling is None else scaling
    is_compiling = torch.compiler.is_compiling()
    step = _COMPILED_BLOCK if is_compiling else length
    # The kernel keeps no weights for the backward pass, and plans of fp32 runs count on that.
    recomputes = q.dtype == torch.float32 and not is_compiling and not dropout
    outputs = []
    for start in range(0, length, step):
        end = min(start + step, length)
        block_bias = bias[:, start:end, :end].flatten(0, 1)
        block = q[:, :, start:end].reshape(-1, group * (end - start), size)
        keys, values = k[:, :end], v[:, :end]
        if recomputes:
            output = _Recomputed.apply(block, keys, values, block_bias, scale)
        else:
            output = torch.bmm(F.dropout(_weights(block, keys, block_bias, scale), dropout), values)
        outputs.append(output.view(num_documents, num_kv_heads, group, end - start, -1))
    output = torch.cat(outputs, 3) if len(outputs) > 1 else outputs[0]
    return output.permute(0, 3, 1, 2, 4).reshape(num_documents, length, num_heads, -1)


def _weights(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale).softmax(-1)


class _Recomputed(torch.autograd.Function):
    """Attention of (batch, length, size) that computes its weights again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.bias, ctx.scale = bias, scale
        return torch.bmm(_weights(q, k, bias, scale), v)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        weights = _weights(q, k, ctx.bias, ctx.scale)
        of_values = torch.bmm(weights.transpose(1, 2), grads[0])
        of_weights = torch.bmm(grads[0], v.transpose(1, 2))
        # The gradient of a softmax: weights · (gradient - its mean under the weights), row by row.
        of_scores = of_weights.sub_((of_weights * weights).sum(-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
        return torch.bmm(of_scores, k), torch.bmm(of_scores.transpose(1, 2), q), of_values, None, None


@functools.lru_cache(maxsize=16)
def _bias(length: int, window: int | None, group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(group, length, length): zero where a query sees a key, minus infinity elsewhere."""
    hidden = ~_band(length, window, device)
    return torch.zeros((), dtype=dtype, device=device).masked_fill(hidden, float("-inf")).repeat(group, 1, 1)


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(length, length) booleans: causal, and at most `window` tokens including the query's own."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
