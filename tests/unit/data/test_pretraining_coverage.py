"""Every token of every document occurs once per epoch, for any number of lanes and any amount of data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scale.data.pretraining import load_pretraining_tokenizer, open_pretraining_data
from accel_scale.data.pretraining.blocks import Block, BlockSource
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.lanes import TrainingSource, _OpenUnit
from accel_scale.data.pretraining.order import UnitOrder

BYTE = load_pretraining_tokenizer("byte")
EOS = BYTE.eos_token_id


def take(path: str, steps: int, *, row_length: int, global_batch_size: int) -> list[list[tuple[list[int], str]]]:
    """Returns (tokens, row id) of each row of each global batch."""
    data: Any = open_pretraining_data(path, tokenizer=BYTE, row_length=row_length, seed=3)
    loader = data.train_loader(global_batch_size=global_batch_size, micro_batch_size=global_batch_size)
    found = []
    for _ in range(steps):
        step = next(loader)
        found.append(list(zip(step.micro_batches[0]["input_ids"].tolist(), step.row_ids[0], strict=True)))
    return found


class ListSource(BlockSource):
    """Blocks of given texts."""

    def __init__(self, blocks: list[list[str]], *, cut: bool) -> None:
        self.kind, self.size_bytes, self.num_blocks = "text", 1, len(blocks)
        self._blocks, self._cut = blocks, cut

    def read(self, block: int) -> Block:
        return Block(list(self._blocks[block]), begins=not self._cut, ends=not self._cut)

    def place(self, block: int, document: int) -> str:
        return f"{block}, {document}"


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.lists(st.integers(1, 200), max_size=6), min_size=1, max_size=6),
    num_lanes=st.integers(1, 40),
    row_length=st.integers(2, 50),
    cut=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_token_of_every_document_once_per_epoch(sizes, num_lanes, row_length, cut, seed) -> None:
    blocks = [["x" * size for size in block] for block in sizes]
    source = TrainingSource("list", ListSource(blocks, cut=cut), len(blocks), 1.0, seed)
    order, encoder = UnitOrder(len(blocks), num_lanes, seed), Encoder(BYTE)
    for epoch in range(2):
        seen: Counter = Counter()
        for position in range(epoch * order.num_units, (epoch + 1) * order.num_units):
            unit = _OpenUnit(source, order, position, encoder, row_length)
            for index in range(len(unit.documents)):
                stretches = unit.stretches(index)
                if stretches:
                    taken = sum(len(tokens) for _, _, tokens in stretches)
                    assert taken >= min(row_length, unit.num_tokens(index)), "no part is shorter than a row"
                for document, start, tokens in stretches:
                    seen.update((unit.unit.block, document, start + offset) for offset in range(len(tokens)))
        expected = Counter(
            (number, document, offset)
            for number, block in enumerate(sizes)
            for document, size in enumerate(block)
            for offset in range(size + (not (cut and document == len(block) - 1)))
        )
        assert seen == expected


def test_one_lane_takes_each_document_once_before_any_twice(write_jsonl) -> None:
    texts = [f"<{index}>" + "y" * (index % 37) for index in range(800)]
    path = write_jsonl("a.jsonl", [{"text": text} for text in texts])
    num_tokens = sum(len(text) + 1 for text in texts)
    batches = take(path, -(-num_tokens // 32), row_length=32, global_batch_size=1)
    stream = [token for batch in batches for token in batch[0][0]][:num_tokens]
    found = BYTE.decode(stream).split(BYTE.eos_token)
    assert sorted(found[:-1]) == sorted(texts)
    assert found[:-1] != texts


@pytest.mark.parametrize("num_documents", [1, 5, 300])
def test_small_data_is_covered_evenly_by_many_lanes(write_jsonl, num_documents: int) -> None:
    """The data has fewer blocks, or even documents, than the batch has rows."""
    rows = [{"text": f"{index:04d}" * (20 if num_documents == 300 else 1000)} for index in range(num_documents)]
    path = write_jsonl("small.jsonl", rows)
    total = sum(len(row["text"]) + 1 for row in rows)
    steps = max(1, 8 * total // (64 * 40))
    batches = take(path, steps, row_length=40, global_batch_size=64)
    names = [row[-1] for row in batches[0]]
    # A row rarely occurs twice in a batch, even if the batch has more than half of all tokens.
    assert len(set(names)) >= (64 if num_documents == 300 else 60)
    counts = Counter(token for batch in batches for row in batch for token in row[0])
    share = counts[EOS] / sum(counts.values())
    assert share == pytest.approx(num_documents / total, rel=0.5)


def test_continuous_text_is_cut_elsewhere_in_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("0123456789abcde\n" * 4096)  # rows of 64 bytes would always begin at the same places
    per_epoch = 4096 * 16 // 64
    batches = take(str(path), per_epoch * 3, row_length=64, global_batch_size=1)
    epochs = [batches[index * per_epoch : (index + 1) * per_epoch] for index in range(3)]
    begins = [Counter(row[-1].split("@")[1].split("-")[0] for batch in epoch for row in batch) for epoch in epochs]
    assert len(set(begins[0]) & set(begins[1])) < len(begins[0]) / 3
    assert len(set(begins[1]) & set(begins[2])) < len(begins[1]) / 3
