"""Attention over packed documents equals masked attention, for any documents, heads, windows and masks."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from accel_scale.modeling import packed_attention
from accel_scale.modeling.packed_attention import packed_attention_forward
from accel_scale.modeling.packed_mask import (
    attach_layout,
    bucket_lengths,
    dense_mask,
    known_documents,
    packed_layout,
    packed_mask,
    with_known_mask,
)
from accel_scale.modeling.packing.row_facts import RowFacts

CPU = torch.device("cpu")


def starts_of(rows: list[list[int]]) -> torch.Tensor:
    """True where a document begins, for rows given as lists of document lengths."""
    starts = torch.zeros(len(rows), sum(rows[0]), dtype=torch.bool)
    for row, lengths in enumerate(rows):
        starts[row, [sum(lengths[:index]) for index in range(len(lengths))]] = True
    return starts


def visible_by_hand(rows: list[list[int]], window: int | None) -> torch.Tensor:
    length = sum(rows[0])
    seen = torch.zeros(len(rows), 1, length, length, dtype=torch.bool)
    for row, lengths in enumerate(rows):
        begin = 0
        for size in lengths:
            for query in range(begin, begin + size):
                first = begin if window is None else max(begin, query - window + 1)
                seen[row, 0, query, first : query + 1] = True
            begin += size
    return seen


def cut(length: int, seed: int) -> list[int]:
    """Document lengths that add up to `length`."""
    places = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: seed % 4] + 1
    bounds = [0, *sorted(places.tolist()), length]
    return [end - begin for begin, end in pairwise(bounds)]


def attend(rows: list[list[int]], window: int | None, heads: tuple[int, int], scaling: float | None, seed: int) -> Any:
    """(packed, masked) outputs and gradients for the same random queries, keys and values."""
    draw = torch.Generator().manual_seed(seed)
    length, (num_heads, num_keys) = sum(rows[0]), heads
    sizes = ((num_heads, 6), (num_keys, 6), (num_keys, 4))
    tensors = [torch.randn(len(rows), n, length, size, generator=draw).requires_grad_() for n, size in sizes]
    weights = torch.randn(len(rows), length, num_heads, 4, generator=draw)
    layout = packed_layout(starts_of(rows), window, CPU)
    module: Any = SimpleNamespace(is_causal=True)
    packed, _ = packed_attention_forward(module, *tensors, attach_layout(layout), scaling=scaling)
    query, key, value = tensors
    group = num_heads // num_keys
    masked = F.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), scale=scaling,
        attn_mask=visible_by_hand(rows, window),
    ).transpose(1, 2)  # fmt: skip
    gradients = [torch.autograd.grad((output * weights).sum(), tensors) for output in (packed, masked)]
    return (packed, *gradients[0]), (masked, *gradients[1])


@settings(max_examples=10, deadline=None)
@given(
    st.integers(2, 40), st.integers(1, 3), st.sampled_from([None, 1, 3, 17]),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.sampled_from([None, 0.3]), st.integers(0, 99),
)  # fmt: skip
@example(2, 1, None, (2, 2), None, 1)  # two documents of one token each
@example(40, 2, 17, (4, 2), 0.3, 3)  # windows longer than some documents
@example(33, 3, 1, (3, 1), None, 7)  # each token sees only itself
def test_values_and_gradients_are_those_of_a_mask(length, num_rows, window, heads, scaling, seed) -> None:
    rows = [cut(length, seed + row) for row in range(num_rows)]
    for ours, theirs in zip(*attend(rows, window, heads, scaling, seed), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_buckets_are_split_by_one_node_of_the_backward_pass_each_tensor() -> None:
    """Slicing each bucket would create a full-size gradient per bucket and then add them all up."""
    tensors = [torch.randn(1, 2, 120, 8).requires_grad_() for _ in range(3)]
    layout = packed_layout(starts_of([[60, 30, 15, 10, 5]]), None, CPU)
    assert len(layout.buckets) > 1
    module: Any = SimpleNamespace(is_causal=True)
    output, _ = packed_attention_forward(module, *tensors, attach_layout(layout))
    nodes, waiting = set(), [output.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in nodes:
            nodes.add(node)
            waiting += [before for before, _ in node.next_functions]
    names = [node.name() for node in nodes]
    assert names.count("SplitWithSizesBackward0") == 3
    assert not any(name.startswith(("Slice", "Add", "Narrow")) for name in names)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_heads_with_and_without_a_kernel_for_them(shares, heads, monkeypatch) -> None:
    device, seen, attention = (
        SimpleNamespace(name="card", has_flash_kernel=False, shares_key_heads=lambda **_: shares),
        set(),
        F.scaled_dot_product_attention,
    )
    monkeypatch.setattr(packed_attention, "_device", lambda _: device)

    def watched(query, key, value, **settings):
        if "enable_gqa" in settings:  # the packed attention's own call, not the masked reference
            seen.add((key.shape[1], value.shape[1], settings["enable_gqa"]))
        return attention(query, key, value, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for ours, theirs in zip(*attend([[5, 9, 3], [17]], None, heads, None, 0), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)

    num_keys = heads[1] if shares else heads[0]
    assert seen == {(num_keys, num_keys, num_keys < heads[0])}, "keys and values are repeated only where they must be"


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_two_products_and_a_softmax_are_the_kernel(window, scaling, heads, monkeypatch) -> None:
    """The path that short bf16 documents take on a CPU, run here in fp32 so that it can be compared."""
    monkeypatch.setattr(packed_attention, "_is_short", lambda *_: True)
    for ours, theirs in zip(*attend([[5, 9, 3], [16, 1]], window, heads, scaling, 2), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dropout_drops_in_both() -> None:
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    for attend_by in (packed_attention._attend_short, packed_attention._attend_fused):
        torch.manual_seed(0)
        kept, dropped = attend_by(q, k, v, None, 0.0, None), attend_by(q, k, v, None, 0.9, None)
        assert not torch.allclose(kept, dropped)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
@example([16, 16])
@example([1])
@example([160, 112, 111, 97, 96])  # rounds to 0.7 of the longest, and to less
@example([40] * 30 + [7])  # one left
def test_buckets_hold_every_document_and_waste_little(lengths) -> None:
    descending = sorted(lengths, reverse=True)
    buckets = bucket_lengths(descending)
    assert sum(number for number, _ in buckets) == len(lengths)
    at = 0
    for number, padded in buckets:
        held = descending[at : at + number]
        assert padded == held[0]
        others = sum(-(-one // 16) * 16 < 0.7 * padded for one in held)
        assert not others or padded * others <= 0.03 * sum(lengths)
        at += number
        assert not others or at == len(lengths)
        assert at == len(lengths) or -(-descending[at] // 16) * 16 < 0.7 * padded


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 50), st.integers(1, 3), st.sampled_from([None, 1, 4]), st.integers(0, 99))
@example(8, 2, 4, 3)
def test_a_layout_has_a_slot_for_each_token_and_stands_for_its_mask(length, num_rows, window, seed) -> None:
    rows = [cut(length, seed + row) for row in range(num_rows)]
    layout = packed_layout(starts_of(rows), window, CPU)
    slots = sum(number * padded for number, padded in layout.buckets)
    assert layout.token_of_slot.shape == (slots,)
    assert layout.token_of_slot[layout.slot_of_token].tolist() == list(range(num_rows * length))
    assert len(layout.padding_slots) == slots - num_rows * length
    assert set(layout.padding_slots.tolist()).isdisjoint(layout.slot_of_token.tolist())
    assert torch.equal(dense_mask(layout), visible_by_hand(rows, window))
    longest = max(size for row in rows for size in row)
    assert layout.window == (None if window is None or window >= longest else window)


# ── Which masks are packed documents ─────────────────────────────────────────────────────────────────────────────────


def documents(rows: list[list[int]], window: int | None = None) -> Any:
    """A mask function like the ones transformers builds."""
    segments = starts_of(rows).cumsum(-1)

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        near = (key <= query) if window is None else (key <= query) & (query - key < window)
        return near & (segments[batch, query] == segments[batch, key])

    return seen


def mask_of(function: Any, rows: int, length: int, **settings: Any) -> Any:
    return packed_mask(rows, length, settings.pop("kv_length", length), mask_function=function, **settings)


def test_packed_rows_and_windows_are_recognised() -> None:
    rows = [[3, 5], [8]]
    for window in (None, 2, 4):
        found = mask_of(documents(rows, window), 2, 8)
        assert torch.equal(dense_mask(found.packed_layout), visible_by_hand(rows, window))
    assert mask_of(documents([[8], [8]]), 2, 8) is None, "plain causal rows need no mask"
    assert mask_of(None, 2, 8) is None
    padding = torch.tensor([[1] * 8, [1] * 6 + [0] * 2])
    assert mask_of(None, 2, 8, attention_mask=padding) is None, "a causal query does not see what follows"


@pytest.mark.parametrize(
    "mask",
    [
        [[0, 1, 1, 1], [1, 1, 1, 1]],  # padded on the left
        [[1, 0, 1, 1], [1, 1, 1, 1]],  # a gap
        [[1, 1, 1, 0], [0, 0, 0, 0]],  # a row of padding
    ],
)
def test_other_padding_is_a_dense_mask(mask) -> None:
    found = mask_of(None, 2, 4, attention_mask=torch.tensor(mask, dtype=torch.bool))
    assert found.shape == (2, 1, 4, 4)
    assert torch.equal(found[:, 0, -1], torch.tensor(mask, dtype=torch.bool))


def test_masks_of_other_shapes_are_dense() -> None:
    rows = [[2, 2]]
    function = documents(rows)
    assert not hasattr(mask_of(function, 1, 1, kv_length=4, q_offset=3), "packed_layout"), "one new token"
    assert not hasattr(mask_of(function, 1, 2, kv_length=4, q_offset=2), "packed_layout"), "a cache"
    assert not hasattr(mask_of(function, 1, 4, q_offset=1), "packed_layout")
    assert not hasattr(mask_of(function, 1, 2, kv_length=2, kv_offset=1), "packed_layout")
    assert hasattr(mask_of(function, 1, 4), "packed_layout")

    def vectorised(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    assert mask_of(vectorised, 1, 4, use_vmap=True, allow_is_causal_skip=False).shape == (1, 1, 4, 4)


@pytest.mark.parametrize("change", ["sees the next token", "does not see itself", "a hole"])
def test_what_is_not_causal_within_documents_stays_dense(change) -> None:
    plain = documents([[4, 4]])

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        usual = plain(batch, head, query, key)
        return {
            "sees the next token": usual | ((query == 1) & (key == 2)),
            "does not see itself": usual & ~((query == 2) & (key == 2)),
            "a hole": usual & ~((query == 3) & (key == 1)),
        }[change]

    found = mask_of(seen, 1, 8, allow_is_causal_skip=False)  # transformers asks this way for masks with functions
    assert not hasattr(found, "packed_layout")
    here = torch.arange(8)
    assert torch.equal(found[0, 0], seen(torch.tensor(0), 0, here[:, None], here[None]))


# ── Documents that the host knows ────────────────────────────────────────────────────────────────────────────────────


def known_mask(rows: list[list[int]], function: Any, *, given: torch.Tensor | None = None, **more: Any) -> Any:
    """`mask_of` rows with known documents, for a model that reshapes its mask, as GPT-2 does."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    inputs = {"input_ids": torch.zeros_like(positions)}
    facts = RowFacts({**inputs, "position_ids": positions})
    found = with_known_mask(inputs if given is None else {**inputs, "attention_mask": given}, facts)
    assert found["input_ids"] is inputs["input_ids"]
    mask = found["attention_mask"]
    assert isinstance(mask, torch.Tensor)
    assert torch.equal(mask, torch.ones(positions.shape, dtype=torch.bool) if given is None else given.bool())
    with known_documents(facts):
        return mask_of(function, *positions.shape, attention_mask=mask.view(len(rows), -1), **more)


def causal(window: int | None = None) -> Any:
    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) if window is None else (key <= query) & (query - key < window)

    return seen


@pytest.mark.parametrize("rows", [[[3, 5], [8]], [[8], [8]], [[1, 1, 6], [2, 6]]])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_known_documents_are_those_that_would_be_found(rows: list[list[int]], window: int | None) -> None:
    # As transformers asks: the mask may be omitted only if it is plainly causal.
    found = known_mask(rows, causal(window), allow_is_causal_skip=window is None)
    if all(len(lengths) == 1 for lengths in rows) and window in (None, 8):
        assert found is None, "plain causal rows need no mask"
    else:
        assert torch.equal(dense_mask(found.packed_layout), visible_by_hand(rows, window))


def test_chunks_begin_anew_in_every_document_that_is_known() -> None:
    """Llama 4's layers see chunks of a document; transformers asks for them by their bounds in a plain row."""
    found = known_mask([[3, 5], [8]], lambda b, h, query, key: (key <= query) & (query // 4 == key // 4))
    assert found.packed_layout.lengths == (3, 4, 1, 4, 4)
    alone = known_mask([[8], [8]], lambda b, h, query, key: (key <= query) & (query // 4 == key // 4))
    assert alone.packed_layout.lengths == (4, 4, 4, 4)


def test_what_else_a_mask_hides_is_hidden_within_known_documents() -> None:
    rows = [[3, 5], [8]]
    own = visible_by_hand(rows, None)

    def in_blocks(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & ((query < 2) == (key < 2))  # two documents made by the function itself: 2 and 6 tokens

    def elsewhere(batch: Any, head: Any, query: Any, key: Any) -> Any:
        if batch.numel() == 1:  # a call with a single row: its tensors are on another device
            raise RuntimeError
        return key <= query

    for function in (in_blocks, elsewhere):
        found = known_mask(rows, function, allow_is_causal_skip=False)
        here = torch.arange(8)
        batch = torch.arange(2)[:, None, None]
        seen = function(batch, 0, here[None, :, None], here[None, None]).expand(2, 8, 8)
        assert torch.equal(found, own & seen[:, None]), function
