"""Find packed documents from the mask that a model requests, and sort them into buckets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from accel_scale.modeling.packing.row_facts import RowFacts, cumulative, uploaded

# Documents whose lengths round up to within this ratio of the longest one share a bucket.
_BUCKET_RATIO = 0.7
_LENGTH_MULTIPLE = 16
# Shorter documents that are left share it, too, if they take up no more than this share of all tokens there.
_SPARE_SHARE = 0.03


class PackedLayout:
    """The place of each token of a (batch, length) block of packed rows.

    Inputs of a kernel are created when first requested: the bounds of documents for a variable-length one, or padded
    buckets.

    Args:
        starts: On the host, true where a document begins; the first token of every row does. (batch, length)
        window: Number of latest tokens that a query sees, including itself; None: its whole document.
        device: Device of the rows.

    Attributes:
        lengths: Lengths of the documents, in the order of the flattened rows.
        window: The given window; None if no document is longer.
    """

    def __init__(self, starts: torch.Tensor, window: int | None, device: torch.device) -> None:
        self.starts, self.device = starts, device
        first = starts.flatten().nonzero().flatten()
        self.lengths: tuple[int, ...] = tuple(torch.diff(first, append=first.new_tensor([starts.numel()])).tolist())
        self.longest = max(self.lengths)
        self.window = None if window is None or window >= self.longest else window

    @functools.cached_property
    def bounds(self) -> torch.Tensor:
        """Flat index of each document's first token, and of the end, in 32 bits. (documents + 1,)"""
        return cumulative(self.lengths, self.device)

    @functools.cached_property
    def segment_ids(self) -> torch.Tensor:
        """Document index of each token within its row. (batch, length)"""
        return uploaded(self.starts.cumsum(-1) - 1, self.device)

    @functools.cached_property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """(number of documents, padded length) of each bucket."""
        return tuple(bucket_lengths(sorted(self.lengths, reverse=True)))

    @property
    def token_of_slot(self) -> torch.Tensor:
        """For each bucket slot, in bucket order, the flat index of its token; 0 for padding. (slots,)"""
        return self._slots[0]

    @property
    def slot_of_token(self) -> torch.Tensor:
        """For each token, the flat index of its slot. (batch · length,)"""
        return self._slots[1]

    @property
    def padding_slots(self) -> torch.Tensor:
        """Slots without a token."""
        return self._slots[2]

    @functools.cached_property
    def _slots(self) -> tuple[torch.Tensor, ...]:
        lengths = torch.tensor(self.lengths)
        first = lengths.cumsum(0) - lengths
        order = torch.argsort(lengths, descending=True, stable=True)
        token_of_slot, padding = [], []
        done = 0
        for num_documents, padded in self.buckets:
            chosen = order[done : done + num_documents, None]
            offsets = torch.arange(padded)[None]
            is_padding = offsets >= lengths[chosen]
            token_of_slot.append((first[chosen] + offsets).masked_fill(is_padding, 0).flatten())
            padding.append(is_padding.flatten())
            done += num_documents
        tokens, is_padding = torch.cat(token_of_slot), torch.cat(padding)
        slot_of_token = torch.empty(self.starts.numel(), dtype=torch.long)
        filled = (~is_padding).nonzero().flatten()
        slot_of_token[tokens[filled]] = filled
        parts = (tokens, slot_of_token, is_padding.nonzero().flatten())
        return uploaded(torch.cat(parts), self.device).split([part.numel() for part in parts])  # one upload


def packed_layout(starts: torch.Tensor, window: int | None, device: torch.device) -> PackedLayout:
    """The layout of documents that begin where `starts`, a boolean (batch, length) tensor, is true.

    The first token of every row begins a document. Lengths are read on the host.
    """
    return PackedLayout(starts.cpu(), window, device)


def bucket_lengths(descending: list[int]) -> list[tuple[int, int]]:
    """(number of documents, padded length) of buckets for document lengths given in descending order."""
    buckets: list[tuple[int, int]] = []
    most_spare = _SPARE_SHARE * sum(descending)
    for index, length in enumerate(descending):
        rounded = -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        padded = buckets[-1][1] if buckets else 0
        is_rest_small = padded * (len(descending) - index) <= most_spare
        if buckets and (rounded >= _BUCKET_RATIO * padded or is_rest_small):
            buckets[-1] = (buckets[-1][0] + 1, padded)
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
    """Called by transformers instead of building the dense (batch, 1, q, kv) mask for `PACKED_ATTENTION`.

    Returns:
        None for plain causal attention (also with right padding: a causal query never sees later positions); the
            (batch, length) carrier of the `PackedLayout` for packed rows; otherwise the dense mask.
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

    facts = _facts_of(attention_mask)
    if facts is not None:
        return _known_mask(facts, mask_function, dense, torch.device(device))
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
    """A 2-D tensor without content that carries `layout` through a model as its attention mask."""
    carrier = torch.empty(layout.starts.shape, dtype=torch.bool, device=layout.device)
    carrier.packed_layout = layout  # type: ignore[attr-defined]
    if layout.device.type == "cuda":
        _ = layout.bounds  # computed in a compiled layer, they would break its graph
    return carrier


# Facts of the running forward passes, the innermost last. An attribute of the mask would be lost if a model reshapes
# its mask, as GPT-2 and OPT do, and its documents would see each other.
_known: list[RowFacts | None] = []


@contextlib.contextmanager
def known_documents(facts: RowFacts | None) -> Iterator[None]:
    """Make `packed_mask` take documents of rows of that shape from `facts` inside, without asking the device."""
    _known.append(facts)
    try:
        yield
    finally:
        _known.pop()


def _facts_of(attention_mask: torch.Tensor | None) -> RowFacts | None:
    facts = _known[-1] if _known and attention_mask is not None else None
    if facts is None or facts.document_lengths is None or attention_mask.shape != facts.shape:  # type: ignore[union-attr]
        return None
    return facts


def with_known_mask(inputs: Mapping[str, object], facts: RowFacts) -> dict[str, object]:
    """Add a 2-D attention mask to `inputs`, given which transformers does not search for documents itself.

    The mask marks existing tokens; `known_documents` supplies the rest.
    """
    given, rows = inputs.get("attention_mask"), inputs["input_ids"]
    assert isinstance(rows, torch.Tensor)
    if isinstance(given, torch.Tensor):
        mask = given.bool()
    else:
        mask = torch.ones(facts.shape, dtype=torch.bool, device=rows.device)
    return {**inputs, "attention_mask": mask}


def _known_mask(
    facts: RowFacts,
    mask_function: Callable[..., object],
    dense: Callable[[], torch.Tensor | None],
    device: torch.device,
) -> torch.Tensor | None:
    """Same as `packed_mask` for known documents; the mask function only contributes windows and chunks."""
    try:
        pattern = _causal_pattern(mask_function, 1, facts.shape[1], torch.device("cpu"))
    except (RuntimeError, IndexError, TypeError):  # it holds tensors of the device, or of the rows
        pattern = None
    if pattern is not None:
        borders = pattern[0].flatten().nonzero().flatten()
        chunk = int(borders[1]) if borders.numel() > 1 else facts.shape[1]
        if torch.equal(borders, torch.arange(0, facts.shape[1], chunk)):  # Llama 4's, restarting in every document
            is_plain = chunk == facts.shape[1] and not facts.is_packed
            layout = PackedLayout(facts.starts(chunk), pattern[1], device)
            return None if is_plain and layout.window is None else attach_layout(layout)
    mask, own = dense(), dense_mask(PackedLayout(facts.starts(), None, device))
    return own if mask is None else mask & own


def _is_right_padded(attention_mask: torch.Tensor, kv_length: int) -> bool:
    """True if every row of the 2-D mask is ones, then zeros."""
    if attention_mask.ndim != 2 or attention_mask.shape[1] != kv_length:
        return False
    mask = attention_mask.bool()
    return bool((mask[:, :-1] | ~mask[:, 1:]).all() & mask[:, 0].all())


def _causal_pattern(
    mask_function: Callable[..., Any], batch_size: int, length: int, device: torch.device
) -> tuple[torch.Tensor, int | None] | None:
    """(document starts on the host, window) if `mask_function` is causal within documents, otherwise None.

    Uses three probes of O(length) each: a token that does not see its predecessor begins a document; no token sees its
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
    # The last position of each token's document: the next start minus one, searched from the right.
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
    """The (batch, 1, length, length) boolean mask that `layout` represents."""
    segments = layout.segment_ids
    position = torch.arange(segments.shape[1], device=segments.device)
    visible = position[:, None] >= position[None]
    if layout.window is not None:
        visible = visible & (position[:, None] - position[None] < layout.window)
    return (segments[:, :, None] == segments[:, None, :])[:, None] & visible
