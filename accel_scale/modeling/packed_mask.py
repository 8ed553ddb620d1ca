"""Find packed documents from the mask a model asks for, and sort them into buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Documents whose lengths round up to within this ratio of the longest one share a bucket.
_BUCKET_RATIO = 0.7
_LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class PackedLayout:
    """Where each token of a (batch, length) block of packed rows goes in the padded buckets.

    Args:
        buckets: (number of documents, padded length) of each bucket.
        token_of_slot: For each bucket slot, in bucket order, the flat index of its token; 0 for padding. (slots,)
        slot_of_token: For each token, the flat index of its slot. (batch · length,)
        padding_slots: Slots without a token.
        window: Number of latest tokens a query sees, itself included; None: its whole document.
        segment_ids: Document index of each token within its row. (batch, length)
    """

    buckets: tuple[tuple[int, int], ...]
    token_of_slot: torch.Tensor
    slot_of_token: torch.Tensor
    padding_slots: torch.Tensor
    window: int | None
    segment_ids: torch.Tensor


def packed_layout(starts: torch.Tensor, window: int | None, device: torch.device) -> PackedLayout:
    """The layout of documents that begin where `starts`, a boolean (batch, length) tensor, is true.

    The first token of every row begins a document. Lengths are read on the host.
    """
    starts = starts.cpu()
    first = starts.flatten().nonzero().flatten()
    num_tokens = starts.numel()
    lengths = torch.diff(first, append=torch.tensor([num_tokens]))
    order = torch.argsort(lengths, descending=True, stable=True)
    sorted_lengths = lengths[order].tolist()
    buckets = bucket_lengths(sorted_lengths)

    token_of_slot, padding = [], []
    start_of = first[order]
    done = 0
    for num_documents, padded in buckets:
        begins = start_of[done : done + num_documents, None]
        offsets = torch.arange(padded)[None]
        is_padding = offsets >= lengths[order[done : done + num_documents], None]
        token_of_slot.append((begins + offsets).masked_fill(is_padding, 0).flatten())
        padding.append(is_padding.flatten())
        done += num_documents
    tokens, is_padding = torch.cat(token_of_slot), torch.cat(padding)
    slot_of_token = torch.empty(num_tokens, dtype=torch.long)
    filled = (~is_padding).nonzero().flatten()
    slot_of_token[tokens[filled]] = filled
    if window is not None and window >= sorted_lengths[0]:
        window = None
    segment_ids = starts.cumsum(-1) - 1
    parts = (tokens, slot_of_token, is_padding.nonzero().flatten(), segment_ids.flatten())
    on_device = torch.cat(parts).to(device).split([part.numel() for part in parts])  # one upload
    return PackedLayout(
        buckets=tuple(buckets),
        token_of_slot=on_device[0],
        slot_of_token=on_device[1],
        padding_slots=on_device[2],
        window=window,
        segment_ids=on_device[3].view_as(segment_ids),
    )


def bucket_lengths(descending: list[int]) -> list[tuple[int, int]]:
    """(number of documents, padded length) of buckets for document lengths given in descending order."""
    buckets: list[tuple[int, int]] = []
    for length in descending:
        rounded = -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        if buckets and rounded >= _BUCKET_RATIO * buckets[-1][1]:
            buckets[-1] = (buckets[-1][0] + 1, buckets[-1][1])
        else:
            buckets.append((1, length))
    return buckets


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """What transformers calls instead of building the dense (batch, 1, q, kv) mask for `PACKED_ATTENTION`.

    Returns:
        None for plain causal attention (also with right padding: a causal query never sees what follows it); the
        (batch, length) document indices, with the `PackedLayout` attached, for packed rows; else the dense mask.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function

    def dense() -> torch.Tensor | None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )

    is_prefill = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if use_vmap or not is_prefill or q_length < 2 or torch.compiler.is_compiling():
        return dense()
    if attention_mask is not None and not _is_right_padded(attention_mask, kv_length):
        return dense()
    pattern = _causal_pattern(mask_function, batch_size, q_length, torch.device(device))
    if pattern is None:
        return dense()
    starts, window = pattern
    if window is None and int(starts.sum()) == batch_size:
        return None
    layout = packed_layout(starts, window, torch.device(device))
    return attach_layout(layout)


def attach_layout(layout: PackedLayout) -> torch.Tensor:
    """A 2-D integer tensor that carries `layout` through a model as its attention mask."""
    carrier = layout.segment_ids
    carrier.packed_layout = layout  # type: ignore[attr-defined]
    return carrier


def _is_right_padded(attention_mask: torch.Tensor, kv_length: int) -> bool:
    """Whether every row of the 2-D mask is ones, then zeros."""
    if attention_mask.ndim != 2 or attention_mask.shape[1] != kv_length:
        return False
    mask = attention_mask.bool()
    return bool((mask[:, :-1] | ~mask[:, 1:]).all() & mask[:, 0].all())


def _causal_pattern(
    mask_function: Callable[..., Any], batch_size: int, length: int, device: torch.device
) -> tuple[torch.Tensor, int | None] | None:
    """(document starts on the host, window) if `mask_function` is causal within documents, else None.

    Three probes of O(length) each: a token that does not see its predecessor begins a document; no token sees its
    successor; and the last query of a document sees either all of it or its last `window` tokens.
    """
    rows = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    positions = torch.arange(length, device=device)[None].expand(batch_size, -1)
    here, before = positions[:, 1:], positions[:, :-1]
    sees_before = mask_function(rows, head, here, before).expand(batch_size, length - 1)
    sees_after = mask_function(rows, head, before, here)
    sees_itself = mask_function(rows, head, positions, positions)
    starts = torch.cat([torch.ones_like(positions[:, :1], dtype=torch.bool), ~sees_before], dim=1)
    # The last position of each token's document: the next start, minus one, searched from the right.
    next_start = torch.where(starts, positions, length).roll(-1, 1)
    next_start[:, -1] = length
    last = next_start.flip(1).cummin(1).values.flip(1) - 1
    from_end = last - positions
    seen = mask_function(rows, head, last, positions).expand(batch_size, length)
    window = torch.where(seen, from_end + 1, 0).max()
    is_window = (seen == (from_end < window)).all()
    facts = torch.stack([~sees_after.any(), sees_itself.all(), is_window, seen.all()]).long()
    on_host = torch.cat([facts, window[None], starts.flatten()]).cpu()  # one wait for the device
    is_causal, is_reflexive, is_window_, sees_document, width = on_host[:5].tolist()
    if not (is_causal and is_reflexive and is_window_):
        return None
    return on_host[5:].view(batch_size, length).bool(), None if sees_document else width


def dense_mask(layout: PackedLayout) -> torch.Tensor:
    """The (batch, 1, length, length) boolean mask that `layout` stands for."""
    segments = layout.segment_ids
    position = torch.arange(segments.shape[1], device=segments.device)
    visible = position[:, None] >= position[None]
    if layout.window is not None:
        visible = visible & (position[:, None] - position[None] < layout.window)
    return (segments[:, :, None] == segments[:, None, :])[:, None] & visible
