"""CUDA's behaviour for fake CPU tensors: what its attention saves, and what its autocast runs in fp32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

# Attribute through which transformers checkpoints its layers.
_CHECKPOINT = "_gradient_checkpointing_func"
# https://pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32; the losses are the head's.
_IN_FP32 = {
    "__pow__", "__rpow__", "__rdiv__", "cosh", "cumprod", "cumsum", "dist", "exp", "expm1", "group_norm", "layer_norm",
    "log", "log10", "log_softmax", "log1p", "log2", "norm", "pow", "prod", "reciprocal", "rsqrt", "sinh", "softmax",
    "softmin", "softplus", "sum", "tan",
}  # fmt: skip


class CudaKernels(TorchFunctionMode):
    """Makes attention one kernel as on CUDA, and gives fp32 inputs to functions that CUDA's autocast runs in fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is dropout:
            return _dropout(*args, **kwargs)
        if getattr(func, "__name__", "") in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_wide(value) for value in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def recomputing_in_kernels(model: nn.Module) -> Iterator[None]:
    """Use CUDA's kernels in `model`'s recomputation too: autograd's engine does not keep modes around `backward`."""
    kept = {module: vars(module)[_CHECKPOINT] for module in model.modules() if _CHECKPOINT in vars(module)}
    for module, checkpoint in kept.items():
        vars(module)[_CHECKPOINT] = functools.partial(_checkpointed, checkpoint)
    try:
        yield
    finally:
        for module, checkpoint in kept.items():
            vars(module)[_CHECKPOINT] = checkpoint


def _checkpointed(checkpoint, function, *args, **options):  # type: ignore[no-untyped-def]
    def inside(*args, **options):  # type: ignore[no-untyped-def]
        with CudaKernels():
            return function(*args, **options)

    return checkpoint(inside, *args, **options)


def _attention(  # type: ignore[no-untyped-def]
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attention as on CUDA, where dropout and other value widths, unsupported by the CPU kernel, cost no memory."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    if query.dim() != 4 or value.shape[-1] != query.shape[-1]:
        return _Attention.apply(query, key, value)
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        attn_mask = attn_mask.to(query.dtype)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _dropout(input, p=0.5, training=True, inplace=False):  # type: ignore[no-untyped-def]
    """Dropout as on CUDA, which saves a mask of one byte per value."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


class _Attention(torch.autograd.Function):
    """Saves its inputs, its result and one sum per row."""

    @staticmethod
    def forward(ctx, query, key, value):  # type: ignore[no-untyped-def]
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _wide(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
