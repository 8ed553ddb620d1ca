"""The all-to-alls of Ulysses: parts of a sequence with all heads become whole sequences with some heads, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import _functional_collectives as collectives

from accel_scale.modeling.packed_attention import in_autocast_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def to_whole_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: ProcessGroup | None, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, heads, T ÷ size, head size) with every head → (batch, heads ÷ size, T, head size) with every position.

    One all-to-all carries queries, keys and values: a rank sends its positions of the heads of each other rank. Rank r
    keeps the r-th of `size` equal runs of heads, in order, so queries stay with the key head they share. If there are
    fewer key heads than ranks, each is sent to all ranks whose queries share it. Differentiable.

    Args:
        query: Queries of this rank's positions; the number of heads is a multiple of `size`.
        key: Keys of these positions; the number of key heads divides `size` or is divided by it.
        value: Like `key`; its head size may differ.
        group: Process group of the `size` ranks, in the order of their parts of the sequence.

    Returns:
        Views of one buffer, whose heads follow its positions.
    """
    num_key_heads = key.shape[1]
    if num_key_heads < size:
        key, value = (tensor.repeat_interleave(size // num_key_heads, 1) for tensor in (key, value))
    tensors = in_autocast_dtype(query, key, value)
    batch_size, _, length, _ = query.shape
    # (batch, heads, length, size) → (ranks, batch, length, features of that rank's heads)
    sent = [
        tensor.unflatten(1, (size, -1)).permute(1, 0, 3, 2, 4).reshape(size, batch_size, length, -1)
        for tensor in tensors
    ]
    widths = [tensor.shape[-1] for tensor in sent]
    received = exchange(torch.cat(sent, -1), group)
    # Parts of the sequence follow each other; a view if there is one row.
    rows = received.transpose(0, 1).reshape(batch_size, size * length, -1)
    q, k, v = (
        part.unflatten(2, (-1, tensor.shape[-1])).transpose(1, 2)
        for part, tensor in zip(rows.split(widths, -1), tensors, strict=True)
    )
    return q, k, v


def to_parts(output: torch.Tensor, group: ProcessGroup | None, size: int) -> torch.Tensor:
    """(batch, T, heads ÷ size, head size) with every position → (batch, T ÷ size, heads, head size) with every head.

    The inverse of `to_whole_rows`, for the output of attention. Differentiable.
    """
    batch_size, length, num_heads, head_size = output.shape
    parts = output.reshape(batch_size, size, length // size, num_heads * head_size).transpose(0, 1)
    received = exchange(parts.contiguous(), group)
    # (ranks, batch, length, features): rank r computed the r-th run of heads.
    return received.permute(1, 2, 0, 3).reshape(batch_size, length // size, size * num_heads, head_size)


def exchange(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Send part i of the first dimension to rank i of `group`; the part from rank i takes its place."""
    received: torch.Tensor = collectives.wait_tensor(
        collectives.all_to_all_single_autograd(parts.contiguous(), None, None, group)
    )
    return received


def gather_positions(position_ids: torch.Tensor, group: Any, size: int) -> torch.Tensor:
    """Gather this rank's (batch, T ÷ size) position ids into the (batch, T) of the whole rows."""
    gathered = collectives.wait_tensor(collectives.all_gather_single(position_ids.contiguous(), 0, group))
    return gathered.unflatten(0, (size, -1)).transpose(0, 1).reshape(position_ids.shape[0], -1)
