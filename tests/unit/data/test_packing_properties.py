"""Packed rows: no token lost or duplicated, nothing predicted across documents, order determined by the seed."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_scale.data.mixture import mix
from accel_scale.data.pretraining import load_pretraining_tokenizer, open_pretraining_data
from accel_scale.data.pretraining.blocks import Block, BlockSource
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.lanes import LaneSet, Rows, TrainingSource
from accel_scale.errors import ConfigError

BYTE = load_pretraining_tokenizer("byte")
EOS = BYTE.eos_token_id
LETTERS = "".join(chr(33 + index) for index in range(90))


class Texts(BlockSource):
    """Blocks of given texts; with `cut`, each block is a part of one continuous text."""

    def __init__(self, blocks: list[list[str]], *, cut: bool = False) -> None:
        self.kind, self.size_bytes, self.num_blocks = "text", 1, len(blocks)
        self._blocks, self._cut = blocks, cut

    def read(self, block: int) -> Block:
        return Block(list(self._blocks[block]), begins=not self._cut, ends=not self._cut)

    def place(self, block: int, document: int) -> str:
        return f"{block}, {document}"


def lanes(
    blocks: list[list[str]],
    *,
    row_length: int,
    num_lanes: int = 1,
    cut: bool = False,
    seed: int = 0,
    **options: object,
) -> LaneSet:
    source = TrainingSource("t", Texts(blocks, cut=cut), len(blocks), 1.0, seed)
    numbers = range(num_lanes)
    return LaneSet([source], Encoder(BYTE), numbers, num_lanes=num_lanes, row_length=row_length, **options)  # type: ignore[arg-type]


def cycle(length: int) -> str:
    """Text in which each letter determines the next one, so that a break in the order shows a seam."""
    return (LETTERS * (length // len(LETTERS) + 1))[:length]


@pytest.mark.parametrize("cut", [False, True])
def test_nothing_is_predicted_across_a_seam(cut: bool) -> None:
    """A long document is read from a place inside it: after its end comes its beginning or another document."""
    made = lanes([[cycle(3001)], [cycle(2003)]], row_length=64, cut=cut)
    seams = inner = 0
    for _ in range(240):
        rows = made.step()
        ids, labels, positions = rows.stacked(positions=True)[:, 0]
        for before, here in zip(range(64), range(1, 64), strict=False):
            follows = ids[here] == EOS or ids[here] - ids[before] in (1, 1 - len(LETTERS))
            if ids[before] == EOS or not follows:
                seams += 1
                inner += ids[here] != ord(LETTERS[0])
                assert labels[here] == -100
                assert positions[here] == 0
            else:
                assert labels[here] == ids[here]
                assert positions[here] == positions[before] + 1
    assert seams >= 8
    assert inner >= 2, "some stretch began inside of its document"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 70), max_size=5), min_size=1, max_size=4), st.integers(1, 33), st.integers(0, 9)
)
@example([[0], [1]], 1, 0)  # an empty document is only its end token; rows of one token
@example([[33, 33]], 33, 1)  # rows as long as the documents without their end tokens
@example([[], [5]], 7, 2)  # a block without documents
def test_an_epoch_of_one_lane_has_every_document_once(sizes, row_length, seed) -> None:
    texts = [[f"{block}-{index} " + "x" * size for index, size in enumerate(one)] for block, one in enumerate(sizes)]
    expected = Counter(text for one in texts for text in one)
    if not expected:
        return
    made = lanes(texts, row_length=row_length, seed=seed)
    total = sum((len(text) + 1) * count for text, count in expected.items())
    stream: list[int] = []
    starts: list[bool] = []
    while len(stream) < total:
        rows = made.step()
        stream += rows.ids[0].tolist()
        starts += rows.starts[0].tolist()
    # Documents longer than a row are read from a place inside them, so tokens are compared, and only short ones whole.
    assert Counter(stream[:total]) == Counter(t for text, n in expected.items() for t in [*text.encode(), EOS] * n)
    if all(len(text) + 1 <= 8 * row_length for text in expected):
        documents = BYTE.decode(stream[:total]).split(BYTE.eos_token)
        assert Counter(documents[:-1]) == expected
        begins = [0, *(index + 1 for index, token in enumerate(stream[: total - 1]) if token == EOS)]
        assert [index for index, start in enumerate(starts[:total]) if start] == begins


def test_a_lane_goes_on_from_its_state() -> None:
    texts = [[cycle(40 * index) for index in range(1, 9)], [cycle(900)]]
    whole, first = (lanes(texts, row_length=32, num_lanes=3) for _ in range(2))
    expected = [whole.step() for _ in range(50)]
    for _ in range(21):
        first.step()
    again = lanes(texts, row_length=32, num_lanes=3, states=first.state())
    for rows in expected[21:]:
        found = again.step()
        assert found.row_ids == rows.row_ids
        assert np.array_equal(found.stacked(positions=True), rows.stacked(positions=True))
    assert again.state() == whole.state()
    source = TrainingSource("t", Texts(texts), 2, 1.0, 0)
    # Lanes shared out among workers equal those of a single one.
    parts = [LaneSet([source], Encoder(BYTE), [n], num_lanes=3, row_length=32) for n in range(3)]
    assert [part.step().row_ids[0] for part in parts] == expected[0].row_ids


@pytest.mark.parametrize(
    ("cut", "num_lanes", "rows"),
    [
        (
            False,
            2,
            [
                "t:1:0@78-94",
                "t:0:1@0-16",
                "t:1:0@174-190",
                "t:1:0@126-142",
                "t:2:0@1-13,2@4-8",
                "t:1:0@31-47",
                "t:2:2@88-104",
                "t:2:2@120-136",
                "t:2:2@184-200",
                "t:2:2@216-232",
            ],
        ),
        (
            True,
            2,
            [
                "t:1:0@123-139",
                "t:0:1@0-16",
                "t:1:0@29-45",
                "t:1:0@18-34",
                "t:2:0@2-13,2@4-9",
                "t:1:0@114-130",
                "t:2:2@89-105",
                "t:2:2@123-139",
                "t:2:2@185-201",
                "t:2:2@219-235",
            ],
        ),
        (
            True,
            7,
            [
                "t:0:1@0-16",
                "t:1:0@186-190,0@0-12",
                "t:1:0@155-164+0:0+2:1@0-3",
                "t:0:1@32-41+2:0@0-7",
                "t:0:1@10-26",
                "t:2:2@27-43",
                "t:1:0@2-18",
                "t:2:2@123-139",
                "t:1:0@130-146",
                "t:2:2@219-235",
            ],
        ),
        (
            False,
            9,
            [
                "t:1:0@14-30",
                "t:2:2@4-20",
                "t:2:2@469-485",
                "t:2:2@100-116",
                "t:2:2@64-80",
                "t:2:2@196-212",
                "t:2:2@160-176",
                "t:2:2@292-308",
                "t:2:2@256-272",
                "t:2:2@388-404",
            ],
        ),
    ],
)
def test_rows_never_change(cut: bool, num_lanes: int, rows: list[str]) -> None:
    """Today's run continues tomorrow with the rows it would have had: documents, parts of them, phases."""
    sizes = [[3, 40, 7], [190], [12, 9, 500, 1]]
    texts = [[cycle(size) for size in block] for block in sizes]
    made = lanes(texts, row_length=16, num_lanes=num_lanes, cut=cut, seed=3)
    found = [made.step().row_ids for _ in range(30)]
    assert [row for step in found[::6] for row in step[-2:]] == rows, "every sixth step, of its last two lanes"


def test_a_source_without_text_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="t has no text"):
        lanes([[]], row_length=4).step()


def test_rows_as_arrays() -> None:
    rows = Rows(np.arange(8, dtype=np.int32).reshape(2, 4), np.zeros((2, 4), dtype=bool), ["a", "b"])
    rows.starts[0, 2] = rows.starts[1, 0] = True
    ids, labels, positions = rows.stacked(positions=True).tolist()
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert labels == [[0, 1, -100, 3], [-100, 5, 6, 7]]
    assert positions == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert len(rows.stacked(positions=False)) == 2


def test_predicted_labels_are_those_that_a_token_precedes(write_jsonl) -> None:
    """Rows that continue a document have a label in their first column, which nothing in the row predicts."""
    path = write_jsonl("long.jsonl", [{"text": cycle(300)} for _ in range(40)])
    data = open_pretraining_data(path, tokenizer=BYTE, row_length=32, isolate_documents=True, seed=3)
    loader, first_labels = data.train_loader(global_batch_size=4, micro_batch_size=2), 0
    for _ in range(6):
        step = next(loader)
        labels = [batch["labels"] for batch in step.micro_batches]
        first_labels += sum(int((one[:, 0] != -100).sum()) for one in labels)
        assert step.num_predicted == sum(int((one[:, 1:] != -100).sum()) for one in labels)
    assert first_labels > 0


# ── Mixtures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def mixed(seed: int, num_sources: int = 2) -> list[tuple[int, int]]:
    from datasets import Dataset

    parts = [Dataset.from_dict({"source": [n] * 200, "row": list(range(200))}) for n in range(num_sources)]
    drawn = mix(parts, [1 / num_sources] * num_sources, seed=seed)[:]
    return list(zip(drawn["source"], drawn["row"], strict=True))


def test_each_source_is_shuffled_by_the_seed() -> None:
    """The seed sets each source's row order too, not only which source is next; equal sources differ in order."""

    def order(seed: int, source: int) -> list[int]:
        return [row for number, row in mixed(seed) if number == source][:100]

    state = random.getstate(), np.random.get_state()[1].tolist()
    assert mixed(1) == mixed(1)
    assert order(1, 0) != order(2, 0)
    assert order(1, 1) != order(2, 1)
    assert order(1, 0) != order(1, 1)
    assert sorted(order(1, 0)) != order(1, 0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state, "the run's random numbers are its own"


def test_a_mixture_of_one_is_that_one() -> None:
    assert [row for _, row in mixed(5, num_sources=1)] == list(range(200))
