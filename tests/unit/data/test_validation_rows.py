"""Held-out rows from blocks with known tokens, and smaller guarantees of the loaders and files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accel_scale.data.pretraining import validation
from accel_scale.data.pretraining.blocks import Block, BlockSource, block_size
from accel_scale.data.pretraining.encoding import Encoder, one_thread_tokenizers
from accel_scale.data.pretraining.lanes import LaneSet, Rows, TrainingSource
from accel_scale.data.pretraining.loader import check_shape
from accel_scale.data.pretraining.prepared import PreparedSource
from accel_scale.data.pretraining.rows import parse_row_id
from accel_scale.data.pretraining.shards import ShardJob, check_shard, finished_shard, write_shard
from accel_scale.data.pretraining.validation import ValidationLoader, ValidationSource
from accel_scale.errors import ConfigError

PAD = 99


class Listed(BlockSource):
    """Blocks of documents of given lengths; each token is its document's number, counted from `first`."""

    kind = "listed"

    def __init__(self, blocks: list[list[int]], *, first: int = 0, fragments: bool = False) -> None:
        self.num_blocks, self.size_bytes, self._fragments = len(blocks), 1, fragments
        self.blocks: list[list[np.ndarray]] = []
        for lengths in blocks:
            self.blocks.append([np.full(n, first + i, dtype=np.int32) for i, n in enumerate(lengths)])
            first += len(lengths)

    def read(self, block: int) -> Block:
        return Block(tokens=self.blocks[block], begins=not self._fragments, ends=not self._fragments)

    def place(self, block: int, document: int) -> str:
        return f"{block}:{document}"


ENCODER: Any = SimpleNamespace(pad_id=PAD)


def loader(*sources: ValidationSource, **changes: Any) -> ValidationLoader:
    usual = {"row_length": 8, "isolate_documents": True, "micro_batch_size": 2, "rank": 0, "world_size": 1}
    return ValidationLoader(sources, ENCODER, **{**usual, "max_rows": None, **changes})


def source(blocks: list[list[int]], *, weight: float = 1.0, first: int = 0, skip: int = 0) -> ValidationSource:
    return ValidationSource("s", Listed(blocks, first=first), skip, len(blocks) - skip, weight)


def test_a_row_of_documents_is_labelled_and_counted_from_their_beginnings() -> None:
    """5 + 2 + 4 tokens in rows of 8: the third document continues in the second row, which has 5 tokens of padding."""
    (batch,) = loader(source([[5, 2, 4]]))
    assert batch["input_ids"].tolist() == [[0] * 5 + [1] * 2 + [2], [2] * 3 + [PAD] * 5]
    no = -100
    assert batch["labels"].tolist() == [[no, 0, 0, 0, 0, no, 1, no], [2, 2, 2, no, no, no, no, no]]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch["position_ids"][1, :3].tolist() == [0, 1, 2]
    assert {values.dtype for values in batch.values()} == {torch.int64}
    (plain,) = loader(source([[5, 2, 4]]), isolate_documents=False)
    assert plain.keys() == {"input_ids", "labels"}
    assert torch.equal(plain["labels"], batch["labels"])


def test_every_token_is_in_one_row_whatever_the_ranks() -> None:
    blocks = [[3, 9, 1], [30], [2, 2, 2, 2], [17, 5]]
    given = source(blocks, skip=1)
    wanted = sorted(t for block in given.source.blocks[1:] for one in block for t in one.tolist())  # type: ignore[attr-defined]
    rows: list[Any] = []
    for ranks in (1, 2, 3):
        parts = [list(loader(given, rank=rank, world_size=ranks)) for rank in range(ranks)]
        assert len({len(part) for part in parts}) == 1, "as many batches on every rank"
        together = torch.cat([torch.cat([part[i]["input_ids"] for part in parts]) for i in range(len(parts[0]))])
        assert sorted(t for t in together.flatten().tolist() if t != PAD) == wanted
        rows.append([row for row in together.tolist() if row != [PAD] * 8])
    assert rows[0] == rows[1] == rows[2]
    starts = sum(int((batch["labels"] == -100).sum() - (batch["input_ids"] == PAD).sum()) for batch in loader(given))
    assert starts == 1 + 4 + 2, "each document begins once"


def test_sources_take_turns_by_their_shares_until_each_has_no_more() -> None:
    one, other = source([[8 * 6]], weight=3.0), source([[8 * 4]], weight=1.0, first=50)
    batches = loader(one, other, micro_batch_size=1)
    found = [int(batch["input_ids"][0, 0]) for batch in batches]
    assert found == [0, 0, 50, 0, 0, 0, 50, 0, 50, 50]
    shares = [found[:4].count(50), found.count(50)]
    assert shares == [1, 4]


def test_validation_rows_never_change() -> None:
    """Losses of today's and tomorrow's runs are compared: the first version read these blocks in this order."""
    found = [int(batch["input_ids"][0, 0]) for batch in loader(source([[8]] * 12), micro_batch_size=1)]
    assert found == [8, 4, 10, 0, 5, 7, 9, 3, 11, 2, 1, 6]


def test_some_rows_are_the_first_ones_and_none_are_refused() -> None:
    given = source([[80]])
    all_rows = [row for batch in loader(given) for row in batch["input_ids"].tolist()]
    assert len(all_rows) == 10
    for most in (1, 2, 3, 10, 50):
        found = [batch["input_ids"].tolist() for batch in loader(given, max_rows=most)]
        assert len(found) == -(-min(most, 10) // 2)
        kept = [row for rows in found for row in rows if row != [PAD] * 8]
        assert kept == all_rows[:most]
    with pytest.raises(ConfigError, match="0 rows are none"):
        loader(given, max_rows=0)
    with pytest.raises(ConfigError, match="no text") as refused:
        list(loader(source([[]])))
    assert refused.value.place == "--validation_share"
    with pytest.raises(ConfigError, match="no rank 2 of 2"):
        loader(given, rank=2, world_size=2)


def test_rows_are_kept_while_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(most_bytes: int) -> int:
        monkeypatch.setattr(validation, "_KEPT_BYTES", most_bytes)
        given, count = source([[8] * 6]), [0]
        read = given.source.read

        def counted(block: int) -> Block:
            count[0] += 1
            return read(block)

        monkeypatch.setattr(given.source, "read", counted)
        rows = loader(given)
        first = [batch["input_ids"].tolist() for batch in rows]
        assert [batch["input_ids"].tolist() for batch in rows] == first
        return count[0]

    batch_bytes = 3 * 2 * 8 * 8
    assert reads(3 * batch_bytes) == 1
    assert reads(3 * batch_bytes - 1) == 2


# ── Lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lanes(*blocks: list[int], num_lanes: int = 2, length: int = 8, **options: Any) -> LaneSet:
    given = TrainingSource("s", Listed(list(blocks), **options), len(blocks), 1.0, 5)
    return LaneSet([given], ENCODER, range(num_lanes), num_lanes=num_lanes, row_length=length)


def test_a_row_id_names_the_tokens_of_its_row() -> None:
    """Whole documents by number, parts by position; also for fragments, and for a document longer than a row."""
    for options in ({}, {"fragments": True}):
        blocks = [[3, 9, 1, 4], [200], [2, 2, 2, 2], [17, 5]]
        made, source_ = lanes(*blocks, **options), Listed(blocks, **options)
        for _ in range(60):
            rows = made.step()
            for ids, name in zip(rows.ids, rows.row_ids, strict=True):
                label, pieces = parse_row_id(name)
                texts = [source_.blocks[piece.block][piece.document][piece.start : piece.end] for piece in pieces]
                assert label == "s"
                assert np.concatenate(texts).tolist() == ids.tolist()
                whole = [piece for piece in pieces if piece.end is None]
                assert all(piece.start == 0 for piece in whole)


def test_a_lane_has_every_token_of_an_epoch_once() -> None:
    made = lanes([40, 8, 16], [200], [64], [24, 32], num_lanes=1)
    for _ in range(3):
        seen = np.concatenate([made.step().ids.flatten() for _ in range(384 // 8)])
        assert np.bincount(seen).tolist() == [40, 8, 16, 200, 64, 24, 32]


def test_labels_and_positions_begin_with_each_document() -> None:
    starts = np.array([[True, False, False, True, True, False], [False, False, True, False, False, False]])
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    stacked = Rows(ids, starts, []).stacked(positions=True)
    assert stacked.dtype == np.int32
    assert stacked[1].tolist() == [[-100, 1, 2, -100, -100, 5], [6, 7, -100, 9, 10, 11]]
    assert stacked[2].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]
    assert Rows(ids, starts, []).stacked(positions=False).shape == (2, 2, 6)


def test_data_without_text_are_refused_and_not_looked_through_for_ever() -> None:
    with pytest.raises(ConfigError, match="s has no text") as refused:
        lanes([], []).step()
    assert refused.value.place == "--data"


# ── Shapes, sizes, threads ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((8, 2, 0, 2, 0), None), ((8, 2, 1, 2, 3), None), ((1, 1, 0, 1, 0), None),
        ((0, 2, 0, 2, 0), "global_batch_size"), ((8, 0, 0, 2, 0), "micro_batch_size"), ((8, 2, 0, 0, 0), "world_size"),
        ((8, 2, 0, 2, -1), "num_workers"), ((8, 2, 2, 2, 0), "rank"), ((8, 2, -1, 2, 0), "rank"),
        ((9, 2, 0, 2, 0), "global_batch_size"), ((6, 2, 0, 2, 0), "global_batch_size"),
    ],
)  # fmt: skip
def test_a_global_batch_is_whole_micro_batches_on_all_ranks(shape: tuple[int, ...], place: str | None) -> None:
    if place is None:
        check_shape(*shape)
        return
    with pytest.raises(ConfigError) as refused:
        check_shape(*shape)
    assert refused.value.place == place


KIB = 1024


@pytest.mark.parametrize(
    ("total", "block", "continuous"),
    [
        (2**40, 256 * KIB, 256 * KIB), (2**30, 256 * KIB, 256 * KIB), (2**28, 64 * KIB, 64 * KIB),
        (2**26, 16 * KIB, 16 * KIB), (2**20, 16 * KIB, 16 * KIB), (2**19, 8 * KIB, 8 * KIB),
        (2**16, KIB, 4 * KIB), (0, KIB, 4 * KIB),
    ],
)  # fmt: skip
def test_blocks_are_a_share_of_the_data(total: int, block: int, continuous: int) -> None:
    assert (block_size(total), block_size(total, continuous=True)) == (block, continuous)


@pytest.mark.parametrize("before", [None, "true"])
@pytest.mark.parametrize("applies", [True, False])
def test_workers_tokenise_on_one_thread_and_the_setting_is_put_back(
    before: str | None, applies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with one_thread_tokenizers(applies):
        assert os.environ.get(name) == (before or ("false" if applies else None))
    assert os.environ.get(name) == before
    with pytest.raises(KeyError), one_thread_tokenizers(applies):
        raise KeyError
    assert os.environ.get(name) == before


# ── Shards ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_shard_is_all_there_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.path.isdir(f"/proc/self/fd/{file}")) or fsync(file))
    renamed: list[int] = []
    monkeypatch.setattr(os, "rename", lambda *paths: renamed.append(len(synced)) or rename(*paths))
    job, blocks = ShardJob(0, 1, 1, 3), [[9], [3, 4], [], [5]]
    ticks: list[int] = []
    encoder: Any = ENCODER
    assert finished_shard(str(tmp_path), job) is None
    facts = write_shard(str(tmp_path), job, Listed(blocks), encoder, "<u2", lambda: ticks.append(1))
    assert ticks == [1, 1]
    assert renamed == [5], "on disk before it has its name: tokens, three indices and what they say"
    assert len(synced) == 6
    if os.path.isdir("/proc/self/fd"):
        assert synced == [False] * 5 + [True], "and then the name"
    assert (facts["num_blocks"], facts["num_documents"], facts["num_tokens"]) == (2, 2, 7)
    assert facts["file_bytes"] == {"tokens.bin": 14, "documents.bin": 24, "blocks.bin": 24, "fragments.bin": 2}
    folder = tmp_path / "source-000" / "shard-00001"
    assert np.fromfile(folder / "tokens.bin", "<u2").tolist() == [1] * 3 + [2] * 4
    assert np.fromfile(folder / "documents.bin", "<i8").tolist() == [0, 3, 7]
    assert np.fromfile(folder / "blocks.bin", "<i8").tolist() == [0, 2, 2]
    assert np.fromfile(folder / "fragments.bin", "u1").tolist() == [3, 3]
    assert finished_shard(str(tmp_path), job) == facts
    check_shard(str(tmp_path), job, facts)
    (folder / "tokens.bin").write_bytes(b"\0" * 14)
    with pytest.raises(ConfigError, match="checksum differs"):
        check_shard(str(tmp_path), job, facts)
    (folder / "tokens.bin").unlink()
    with pytest.raises(ConfigError, match="checksum differs"):
        check_shard(str(tmp_path), job, facts)

    def stop() -> None:
        raise KeyboardInterrupt

    other = ShardJob(0, 2, 0, 2)
    with pytest.raises(KeyboardInterrupt):
        write_shard(str(tmp_path), other, Listed(blocks, fragments=True), encoder, "<u4", stop)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["shard-00001"]
    write_shard(str(tmp_path), other, Listed(blocks, fragments=True), encoder, "<u4", lambda: None)
    assert np.fromfile(folder.with_name("shard-00002") / "fragments.bin", "u1").tolist() == [0, 0]
    assert np.fromfile(folder.with_name("shard-00002") / "tokens.bin", "<u4").tolist() == [0] * 9 + [1] * 3 + [2] * 4


class Slow:
    """A tokenizer of letters without a fast backend."""

    bos_token_id, eos_token_id, pad_token_id = 1, None, None

    def __init__(self, *, opens: bool) -> None:
        self.opens = opens

    def __len__(self) -> int:
        return 30

    def __call__(self, text: Any, *, add_special_tokens: bool, **options: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": [1, 5] if self.opens and add_special_tokens else [5]}
        assert (add_special_tokens, options) == (False, {"split_special_tokens": True})
        return {"input_ids": [[ord(letter) - 90 for letter in one] for one in text]}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 7}


@pytest.mark.parametrize("opens", [True, False])
def test_documents_are_opened_as_the_tokenizer_itself_would(opens: bool) -> None:
    tokenizer: Any = Slow(opens=opens)
    encoder = Encoder(tokenizer)
    assert (encoder.prefix, encoder.suffix, encoder.pad_id, encoder.vocab_size) == ([1] if opens else [], [], 0, 30)
    found = encoder.encode(["ab", "c"], [True, False], [False, True])
    assert [tokens.tolist() for tokens in found] == [[1, 7, 8] if opens else [7, 8], [9]]
    assert found[0].dtype == np.int32
    tokenizer.eos_token_id = 2
    ended = Encoder(tokenizer)
    assert (ended.suffix, ended.pad_id) == ([2], 2)
    found = ended.encode(["ab", "c"], [False, False], [False, True])
    assert [tokens.tolist() for tokens in found] == [[7, 8], [9, 2]]
    assert [tokens.tolist() for tokens in ended.encode(["a"])] == [[1, 7, 2] if opens else [7, 2]]
    tokenizer.pad_token_id = 4
    assert Encoder(tokenizer).pad_id == 4
    assert ended.fingerprint() != encoder.fingerprint()
    assert ended.fingerprint() == Encoder(tokenizer).fingerprint(), "padding changes no token"
    tokenizer.bos_token_id = None
    assert Encoder(tokenizer).prefix == []


def test_blocks_of_prepared_data_are_those_of_the_data(tmp_path: Path) -> None:
    """Two shards; in the first one, documents continue beyond their blocks in both directions."""
    blocks, encoder = [[9], [3, 4], [], [5]], ENCODER
    facts = []
    for shard, (first, end) in enumerate(((0, 2), (2, 4))):
        given = Listed(blocks, fragments=shard == 0)
        facts.append(write_shard(str(tmp_path), ShardJob(0, shard, first, end), given, encoder, "<u2", lambda: None))
    told = {"name": "s", "size_bytes": 77, "num_tokens": 21, "continuous": True, "shards": facts}
    source_ = PreparedSource(str(tmp_path), 0, {"dtype": "<u2", "sources": [told]})
    assert (source_.num_blocks, source_.size_bytes, source_.num_tokens, source_.continuous) == (4, 77, 21, True)
    for number, lengths in enumerate(blocks):
        block = source_.read(number)
        assert [len(tokens) for tokens in block.tokens or ()] == lengths
        assert (block.begins, block.ends) == ((False, False) if number < 2 else (True, True))
        assert source_.block_tokens(number) == sum(lengths)
    tokens = source_.read(1).tokens
    assert tokens is not None
    assert [one.tolist() for one in tokens] == [[1] * 3, [2] * 4]
    assert tokens[0].dtype == np.int32
    assert source_.place(1, 0).endswith("block 1, document 1 of s")
    path = tmp_path / "source-000" / "shard-00001" / "tokens.bin"
    path.write_bytes(b"\0" * 4)
    with pytest.raises(ConfigError, match="has 4 bytes instead of 10"):
        PreparedSource(str(tmp_path), 0, {"dtype": "<u2", "sources": [told]})
    path.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        PreparedSource(str(tmp_path), 0, {"dtype": "<u2", "sources": [told]})
