"""torch's variable-length attention kernels in plain fp32 operators, with the kernels' arguments and requirements.

`torch.nn.attention.varlen` (2.13) has no CPU kernel. Arguments of its operators are checked here as in FlashAttention,
and the values are those of masked attention.
"""

from __future__ import annotations

import torch

_HALF = (torch.float16, torch.bfloat16)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference for `torch_attn::_varlen_attn`."""
    assert seqused_k is None
    assert block_table is None
    assert enable_gqa == (query.shape[1] != key.shape[1])
    bounds = _checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    (_, _, values, weights), _ = _parts(query, key, value, bounds, is_causal, scale, window_size)
    output = (weights @ values).transpose(0, 1)
    sums = torch.zeros(query.shape[1], query.shape[0])
    return output.to(query.dtype), sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Reference for `torch_attn::_varlen_attn_backward`."""
    assert grad_out.shape == out.shape == query.shape
    bounds = _checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    parts, factor = _parts(query, key, value, bounds, is_causal, scale, window_size)
    queries, keys, values, weights = parts
    grad = grad_out.float().transpose(0, 1)
    by_weight = grad @ values.transpose(1, 2)
    by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True)) * factor
    shape = (key.shape[1], -1, *key.shape[::2])  # query heads of a group share a key head
    of_keys = (by_score.transpose(1, 2) @ queries).view(shape).sum(1).transpose(0, 1)
    of_values = (weights.transpose(1, 2) @ grad).view(shape).sum(1).transpose(0, 1)
    return tuple(each.to(query.dtype) for each in ((by_score @ keys).transpose(0, 1), of_keys, of_values))


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
) -> list[int]:
    assert query.dtype in _HALF
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert query.shape[1] % key.shape[1] == 0
    assert cu_seq_k is not None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    bounds: list[int] = cu_seq_q.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(query) == len(key) == len(value)
    longest = int(cu_seq_q.diff().max())
    assert max_q >= longest
    assert max_k >= longest
    return bounds


def _parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: list[int],
    is_causal: bool,
    scale: float | None,
    window_size: list[int] | None,
) -> tuple[tuple[torch.Tensor, ...], float]:
    """Queries, keys and values by query head and the softmax of their scores, in fp32, and the factor on scores."""
    left, right = window_size or (-1, -1)
    tokens = torch.arange(len(query))
    document = torch.bucketize(tokens, torch.tensor(bounds[1:]), right=True)
    ahead = tokens[None] - tokens[:, None]  # key position relative to the query
    seen = document[:, None] == document[None]
    if left >= 0:
        seen &= ahead >= -left
    if is_causal or right >= 0:
        seen &= ahead <= (0 if is_causal else right)
    group = query.shape[1] // key.shape[1]
    queries = query.float().transpose(0, 1)
    keys, values = (tensor.float().repeat_interleave(group, 1).transpose(0, 1) for tensor in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = queries @ keys.transpose(1, 2) * factor
    return (queries, keys, values, scores.masked_fill(~seen, float("-inf")).softmax(-1)), factor


VARLEN_KERNELS = {"torch_attn::_varlen_attn": forward, "torch_attn::_varlen_attn_backward": backward}
