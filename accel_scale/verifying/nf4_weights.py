"""4-bit weights for trial steps: quantised random weights, or only their shapes if nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# bitsandbytes' block sizes: weights per constant, and constants per nested constant.
_BLOCK, _NESTED_BLOCK = 64, 256


def quantise_linears(model: Any, *, double: bool, compute_dtype: torch.dtype, device: str) -> None:
    """Replace every linear of `model` except the head by a bitsandbytes NF4 layer, one at a time.

    Args:
        double: Whether to quantise the constants too.
        compute_dtype: Dtype of their products.
        device: ``cuda`` or ``cpu``; on ``meta`` the quantised tensors are created without values.
    """
    import bitsandbytes as bnb

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child is model.get_output_embeddings():
                continue
            linear = bnb.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                compute_dtype=compute_dtype,
                compress_statistics=double,
                quant_type="nf4",
                device="meta",
            )
            weight = _without_values(child.weight, double) if device == "meta" else _quantised(child, double)
            weight.module = linear
            linear.weight = weight
            linear.bias = child.bias
            setattr(parent, name, linear)
    model.is_loaded_in_4bit = True  # read by PEFT


def _quantised(linear: nn.Linear, double: bool) -> Any:
    import bitsandbytes as bnb

    weight = linear.weight.data
    packed: Any = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=double, quant_type="nf4")
    return packed.to(weight.device)


def _without_values(weight: torch.Tensor, double: bool) -> Any:
    """A quantised weight without values: packed bytes, constants, and nested constants (`QuantState`, 0.50.2)."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_blocks = -(-weight.numel() // _BLOCK)
    nested = None
    if double:
        constants = empty(-(-num_blocks // _NESTED_BLOCK))
        nested = QuantState(constants, code=empty(256), blocksize=_NESTED_BLOCK, dtype=torch.float32)
    state = QuantState(
        empty(num_blocks, dtype=torch.uint8 if double else torch.float32),
        shape=weight.shape,
        code=empty(16),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=weight.dtype,
        offset=empty() if double else None,
        state2=nested,
    )
    packed = empty(-(-weight.numel() // 2), 1, dtype=torch.uint8)
    return bnb.nn.Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        compress_statistics=double,
        quant_type="nf4",
        bnb_quantized=True,
    )


def moved_from_meta(weight: Any, device: str = "cpu") -> nn.Parameter:
    """A 4-bit weight of `_without_values` with its tensors on another device, for use under `FakeTensorMode`.

    Returns a plain parameter: fake tensors do not support subclasses such as `Params4bit`.
    """
    state = weight.quant_state
    for part in (state, state.state2):
        for name in ("absmax", "code", "offset"):
            tensor = getattr(part, name, None)
            if isinstance(tensor, torch.Tensor):
                setattr(part, name, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    moved = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=device), requires_grad=False)
    moved.quant_state = state  # type: ignore[attr-defined]
    return moved
