"""Losses for any chunk size, ignored labels and halves of a micro-batch: same value, same gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from accel_scale.optimization import loss as loss_module
from accel_scale.optimization.batch_splitting import num_rows, split
from accel_scale.optimization.loss import chunked_cross_entropy, count_loss_tokens, default_chunk_size

VOCAB, HIDDEN = 23, 8
IGNORED = -100


def inputs(num_rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states, the head's weight, and labels, half of which are ignored."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, length, HIDDEN, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=draw).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (num_rows, length), generator=draw)
    labels[torch.rand(num_rows, length, generator=draw) < 0.5] = IGNORED
    return hidden, weight, labels


def full_sum(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.t())[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 40), st.sampled_from([1.0, 7.0, 3.5]), st.integers(0, 99))
@example(1, 1, 1, 1.0, 0)  # a single token: nothing is predicted
@example(2, 12, 22, 1.0, 1)  # about as many tokens in a chunk as labels
@example(3, 12, 1, 7.0, 2)  # one token per chunk
def test_any_chunk_size_gives_the_same_value_and_gradients(num_rows, length, chunk_size, num_items, seed) -> None:
    hidden, weight, labels = inputs(num_rows, length, seed)
    expected = full_sum(hidden, weight, labels) / num_items
    actual = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, num_items=num_items)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert count_loss_tokens(labels).item() == (labels[:, 1:] != IGNORED).sum()
    theirs = torch.autograd.grad(expected, (hidden, weight))
    for mine, other in zip(torch.autograd.grad(actual, (hidden, weight)), theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_grad_bytes", [0, 2**30], ids=["head_grad_later", "head_grad_in_forward"])
def test_many_chunks_in_bf16_sum_the_heads_gradient_in_fp32(head_grad_bytes, monkeypatch) -> None:
    """A bf16 sum stalls once a chunk's share falls below 1/256 of it: rows of 2,000 tokens lost a third."""
    monkeypatch.setattr(loss_module, "HEAD_GRAD_IN_FORWARD_BYTES", head_grad_bytes)
    tokens = 2048
    hidden = (torch.ones(1, tokens, HIDDEN) + 0.01 * torch.randn(1, tokens, HIDDEN)).requires_grad_()
    weight = (0.01 * torch.randn(VOCAB, HIDDEN)).requires_grad_()
    labels = torch.full((1, tokens), 3)
    (expected,) = torch.autograd.grad(full_sum(hidden, weight, labels), weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=2, num_items=1)
    (found,) = torch.autograd.grad(loss, weight)
    assert found.dtype == torch.float32
    assert ((found - expected).norm() / expected.norm()).item() < 0.01


@pytest.mark.parametrize(("spare_bytes", "num_products"), [(0, 3), (-1, 6), (1, 3)])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_large_heads_logits_are_computed_twice_and_a_small_ones_once(
    spare_bytes, num_products, is_frozen, monkeypatch
) -> None:
    """A head's gradient above the limit, counted in fp32, waits for the backward pass; a frozen head has none."""
    monkeypatch.setattr(loss_module, "HEAD_GRAD_IN_FORWARD_BYTES", 4 * VOCAB * HIDDEN + spare_bytes)
    calls, logits = [], loss_module._Head.logits
    monkeypatch.setattr(loss_module._Head, "logits", lambda *given: calls.append(1) or logits(*given))
    hidden, weight, _ = inputs(1, 9, 3, torch.bfloat16)
    loss = chunked_cross_entropy(hidden, weight.detach() if is_frozen else weight, torch.ones(1, 9, dtype=torch.long),
                                 chunk_size=3)  # fmt: skip
    assert len(calls) == 3
    loss.backward()
    assert len(calls) == (3 if is_frozen else num_products)


def test_gradients_of_a_bias_and_of_a_frozen_head() -> None:
    hidden, weight, labels = inputs(2, 9, 3)
    bias = torch.zeros(VOCAB, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight.detach(), labels, chunk_size=4, bias=bias, num_items=2)
    ours = torch.autograd.grad(loss, (hidden, bias))
    logits = (hidden @ weight.detach().t() + bias)[:, :-1].flatten(0, 1)
    full = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / 2
    for mine, other in zip(ours, torch.autograd.grad(full, (hidden, bias)), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_nothing_is_kept_without_gradients_and_an_unused_loss_has_none() -> None:
    hidden, weight, labels = inputs(1, 9, 4)
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, weight, labels).grad_fn is None
    loss, num_correct = chunked_cross_entropy(hidden, weight, labels, return_num_correct=True)
    assert not num_correct.requires_grad
    assert loss.requires_grad
    cpu, mps = torch.device("cpu"), torch.device("mps")
    assert default_chunk_size(2**22, cpu, is_trained=True) == 64  # the smallest chunk
    assert default_chunk_size(1024, cpu, is_trained=True) == 4096
    assert default_chunk_size(1024, mps, is_trained=True) == 2**18


# ── Halves of a micro-batch ──────────────────────────────────────────────────────────────────────────────────────────


def batch(labels: list[list[int]], positions: list[list[int]] | None = None) -> dict[str, torch.Tensor]:
    rows = torch.tensor(labels)
    found = {"input_ids": torch.arange(rows.numel()).view(rows.shape), "labels": rows}
    return found | ({"position_ids": torch.tensor(positions)} if positions else {})


def test_the_first_label_predicts_nothing_and_weighs_nothing() -> None:
    """Row 0 has a label in its first column, which no token precedes, so both rows weigh 3."""
    parts = split(batch([[5, 1, 2, 3], [IGNORED, 1, 2, 3]]), 1, loss_kind="token_mean")
    assert [part.factor for part in parts] == [0.5, 0.5]
    uneven = split(batch([[5, 1, 2, 3], [5, IGNORED, IGNORED, 3]]), 1, loss_kind="token_mean")
    assert [part.factor for part in uneven] == [0.75, 0.25]
    assert [part.factor for part in split(batch([[1, 2]] * 3), 1, loss_kind="row_mean")] == [2 / 3, 1 / 3]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(2, 9), st.integers(0, 3), st.integers(0, 99))
@example(1, 2, 3, 0)  # nothing to halve: repetitions with factor 0
@example(3, 5, 2, 1)  # an odd number of rows
def test_parts_add_up_to_the_whole(num_rows, length, level, seed) -> None:
    hidden, weight, labels = inputs(num_rows, length, seed)
    whole = {"input_ids": torch.arange(num_rows * length).view(num_rows, length), "labels": labels}
    for kind, divisor in (("sum", 1), ("token_mean", max(1, int(count_loss_tokens(labels)))), ("row_mean", num_rows)):
        parts = split(whole, level, loss_kind=kind)
        assert len(parts) == 2**level
        total = 0.0
        for part in parts:
            if not part.factor:
                continue
            rows = part.inputs["input_ids"][:, 0] // length
            value = full_sum(hidden[rows], weight, labels[rows])
            mine = {"sum": 1, "token_mean": max(1, int(count_loss_tokens(labels[rows]))), "row_mean": len(rows)}[kind]
            total += part.factor * value.item() / mine
        assert total == pytest.approx(full_sum(hidden, weight, labels).item() / divisor, rel=1e-4, abs=1e-5)


def test_a_packed_row_is_cut_between_documents_nearest_to_its_middle() -> None:
    positions = [[0, 1, 0, 1, 2, 0, 1, 2]]
    labels = [[IGNORED, 1, IGNORED, 3, 4, IGNORED, 6, 7]]
    first, second = split(batch(labels, positions), 1)
    assert first.inputs["input_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert second.inputs["input_ids"].tolist() == [[5, 6, 7]]
    labels[0][5] = 5  # predicted from the previous document: a cut there would lose it
    first, second = split(batch(labels, positions), 1)
    assert first.inputs["input_ids"].tolist() == [[0, 1]]
    bounds = {"cu_seq_lens_q": torch.tensor([0, 2, 5, 8], dtype=torch.int32), "max_length_q": 3}
    first, second = split({**batch(labels, positions), **bounds}, 1)
    assert first.inputs["cu_seq_lens_q"].tolist() == [0, 2]
    assert second.inputs["cu_seq_lens_q"].tolist() == [0, 3, 6]
    assert second.inputs["cu_seq_lens_q"].dtype == torch.int32
    assert (first.inputs["max_length_q"], second.inputs["max_length_q"]) == (2, 3)


def test_what_has_no_entry_for_each_row_is_not_cut() -> None:
    whole = batch([[1, 2], [3, 4]]) | {"pixel_values": torch.zeros(7, 3)}
    assert [part.factor for part in split(whole, 1)] == [1.0, 0.0]
    assert num_rows({"pixel_values": torch.zeros(3, 2), "scale": torch.tensor(1.0)}) == 3, "of its first tensor"
    assert num_rows({"names": ["a"]}) == num_rows([torch.zeros(2)]) == 0
    listed = split(batch([[1, 2], [3, 4]]) | {"names": ["a", "b"], "scale": 2.0}, 1)
    assert [part.inputs["names"] for part in listed] == [["a"], ["b"]]
    assert [part.inputs["scale"] for part in listed] == [2.0, 2.0]


def test_document_numbers_begin_again_and_what_cannot_be_cut_is_not() -> None:
    positions = [[0, 1, 0, 1, 2, 0, 1, 2]]
    labels = [[IGNORED, 1, IGNORED, 3, 4, IGNORED, 6, 7]]
    whole = {**batch(labels, positions), "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]])}
    first, second = split(whole, 1)
    assert first.inputs["seq_idx"].tolist() == [[0, 0, 1, 1, 1]]
    assert second.inputs["seq_idx"].tolist() == [[0, 0, 0]]
    for uncut in (
        {**whole, "pixel_values": torch.zeros(8, 1)},
        {**whole, "position_ids": torch.zeros(3, 1, 8)},
        {**whole, "position_ids": torch.arange(8)},
        batch([[1, 2]]),
        {**whole, "labels": torch.tensor([[IGNORED, 1, 2, 3, 4, 5, 6, 7]])},
        batch([[1] * 4], [[0, 1, 2, 3]]),
        [{"a": 1}, {"a": 2}],
    ):
        assert [(part.inputs is uncut, part.factor) for part in split(uncut, 1)] == [(True, 1.0), (True, 0.0)]
    kept = split({**whole, "scale": torch.tensor(2.0), "names": ["a"]}, 1)
    assert [(part.inputs["scale"].item(), part.inputs["names"]) for part in kept] == [(2.0, ["a"])] * 2


def test_parts_without_labels_weigh_by_rows_and_repetitions_weigh_nothing() -> None:
    rows = {"input_ids": torch.arange(6).view(3, 2)}
    assert [part.factor for part in split(rows, 1, loss_kind="token_mean")] == [2 / 3, 1 / 3]
    classes = {**rows, "labels": torch.tensor([0, 1, 1])}
    assert [part.factor for part in split(classes, 1, loss_kind="token_mean")] == [2 / 3, 1 / 3]
    assert [part.factor for part in split(rows, 2, loss_kind="row_mean")] == [1 / 3, 1 / 3, 1 / 3, 0]
    nothing = batch([[IGNORED] * 2] * 2)
    assert [part.factor for part in split(nothing, 1, loss_kind="token_mean")] == [0, 0]
    assert [part.factor for part in split(nothing, 0, loss_kind="token_mean")] == [1.0]
