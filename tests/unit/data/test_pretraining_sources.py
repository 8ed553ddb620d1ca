"""Sources of pretraining data: which may be named, what is held out, and the errors for anything else."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from accel_scale.data.pretraining import load_pretraining_tokenizer, open_pretraining_data, sample_texts
from accel_scale.data.pretraining.finding import _cached_files, find_sources
from accel_scale.data.pretraining.tables import TableSource
from accel_scale.errors import ConfigError

BYTE = load_pretraining_tokenizer("byte")
OPTIONS: dict[str, Any] = {"text_column": "text", "text_documents": "file"}


@pytest.fixture
def texts() -> list[str]:
    draw = random.Random(2)
    return [f"document {index}" + " word" * draw.randrange(80) for index in range(6000)]


def all_texts(data: Any, **options: Any) -> list[str]:
    sources, _ = find_sources(data, **{**OPTIONS, **options})
    return [text for one in sources for block in range(one.source.num_blocks) for text in one.source.read(block).texts]


def test_all_kinds_of_files_hold_the_same(tmp_path: Path, texts: list[str], write_jsonl) -> None:
    from datasets import Dataset, DatasetDict

    table = pa.table({"id": range(len(texts)), "text": texts})
    large = table.set_column(1, "text", table["text"].cast(pa.large_string()))
    Dataset(table).save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": Dataset(table), "test": Dataset(table.slice(0, 9))}).save_to_disk(str(tmp_path / "splits"))
    pq.write_table(table, tmp_path / "small.parquet", row_group_size=200)
    pq.write_table(table, tmp_path / "large.parquet")
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), large.schema) as writer:
        writer.write_table(large)
    write_jsonl("rows.jsonl", [{"text": text} for text in texts])
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    kinds = {}
    for name in ("saved", "splits", "small.parquet", "large.parquet", "file.arrow", "rows.jsonl", "lines.txt"):
        assert all_texts(str(tmp_path / name), text_documents="line") == texts
        kinds[name] = find_sources(str(tmp_path / name), **OPTIONS)[0][0].source.kind
    assert kinds["small.parquet"] == "parquet"
    assert kinds["large.parquet"] == "arrow"


def test_large_row_groups_are_converted_once(tmp_path: Path, own_cache: Path) -> None:
    texts = [f"{index} " + "x" * 400 for index in range(20_000)]
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="none", use_dictionary=False)
    assert all_texts(str(path)) == texts
    source = find_sources(str(path), **OPTIONS)[0][0].source
    assert source.kind == "arrow"
    assert source.num_blocks > 400
    (converted,) = own_cache.glob("accel_scale_pretraining/*/00000.arrow")
    written = converted.stat().st_mtime_ns
    assert all_texts(str(path)) == texts
    assert converted.stat().st_mtime_ns == written
    assert source.place(source.num_blocks - 1, 0).startswith(f"{path}, row ")


def test_folders_and_globs_take_the_training_split(tmp_path: Path, write_jsonl) -> None:
    write_jsonl("folder/train.jsonl", [{"text": "one"}])
    write_jsonl("folder/more/the test.jsonl", [{"text": "two"}])  # a title, not a split
    write_jsonl("folder/validation.jsonl", [{"text": "three"}])
    write_jsonl("folder/.cache/old.jsonl", [{"text": "four"}])
    (tmp_path / "folder" / "README.md").write_text("no data")
    (tmp_path / "folder" / "licences.csv").write_text("no text")
    sources, notes = find_sources(str(tmp_path / "folder"), **OPTIONS)
    assert sorted(all_texts(str(tmp_path / "folder"))) == ["one", "two"]
    assert "licences.csv are left out" in notes[0]
    assert "1 files of other splits than train are left out" in notes[1]
    assert all_texts(str(tmp_path / "folder" / "val*.jsonl")) == ["three"]
    assert [one.label for one in sources] == ["folder"]


def test_text_files_are_documents_lines_or_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\nthree\n")
    assert all_texts(str(path)) == ["one\ntwo\n\nthree\n"]
    assert all_texts(str(path), text_documents="line") == ["one", "two", "three"]
    assert all_texts(str(path), text_documents="paragraph") == ["one\ntwo", "three"]


def test_shares(tmp_path: Path, write_jsonl) -> None:
    one = write_jsonl("a/rows.jsonl", [{"text": "x" * 100}] * 30)
    other = write_jsonl("b/rows.jsonl", [{"text": "x" * 100}] * 10)
    sources, _ = find_sources([one, other], **OPTIONS)
    assert [source.weight for source in sources] == [0.75, 0.25]  # their sizes in bytes
    assert [source.label for source in sources] == ["rows.jsonl", "rows.jsonl.2"]
    sources, _ = find_sources([f"{one}=2", f"{other}=6"], **OPTIONS)
    assert [source.weight for source in sources] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("data", "problem", "place"),
    [
        ("{folder}/rows.jsonll", "does not exist", "--data"),
        ("{folder}/rows.jsonl.gz", "is compressed", "{folder}/rows.jsonl.gz"),
        ("{folder}/table.csv", "not of a kind that pretraining reads", "{folder}/table.csv"),
        ("{folder}", "is compressed", None),
        ("{folder}/mixed", "holds files of several kinds", "--data"),
        ("{folder}/empty", "has no data files", "--data"),
        ("{folder}/*.nothing", "has no data files", "--data"),
        ("{folder}/empty.txt", "no text in it", "{folder}/empty.txt"),
        ("{folder}/table.parquet", "no column 'text'; it has 'id', 'body'", "{folder}/table.parquet"),
        ("{folder}/numbers.parquet", "holds int64, not text", "{folder}/numbers.parquet"),
        ("{folder}/broken.parquet", "cannot be read as Parquet", "{folder}/broken.parquet"),
        ("{folder}/broken.arrow", "cannot be read as Arrow", "{folder}/broken.arrow"),
        (["{folder}/rows.jsonl=0.5", "{folder}/rows.jsonl"], "has a weight and", "--data"),
        ("{folder}/rows.jsonl=-1", "not a number above 0", "--data"),
        ([], "no data is named", "--data"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, write_jsonl, data, problem, place) -> None:
    write_jsonl("rows.jsonl", [{"text": "x"}])
    write_jsonl("rows.jsonl.gz", [{"text": "x"}])
    write_jsonl("mixed/rows.jsonl", [{"text": "x"}])
    (tmp_path / "mixed" / "book.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("empty.txt", "table.csv"):
        (tmp_path / name).write_text("")
    for name in ("broken.parquet", "broken.arrow"):
        (tmp_path / name).write_text("this is not what its name says")
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "table.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    named = [item.format(folder=tmp_path) for item in ([data] if isinstance(data, str) else data)]
    with pytest.raises(ConfigError) as error:
        find_sources(named, **OPTIONS)
    assert problem in error.value.problem
    assert place is None or error.value.place == place.format(folder=tmp_path)
    assert error.value.fix


def test_what_the_datasets_library_loads_is_read_from_its_cache(write_jsonl, texts) -> None:
    """As for a hub data set, whose files `load_dataset` downloads to the cache."""
    from datasets import load_dataset

    path = write_jsonl("rows.jsonl", [{"text": text} for text in texts])
    dataset = load_dataset("json", data_files=path, split="train")
    source = TableSource("arrow", "some/name", _cached_files("some/name", dataset), "text")
    assert [text for block in range(source.num_blocks) for text in source.read(block).texts] == texts
    assert source.place(0, 2) == "some/name, row 3"


def test_a_hub_data_set_that_cannot_be_reached() -> None:
    with pytest.raises(ConfigError) as error:
        find_sources("nobody/nothing-of-that-name", **OPTIONS)
    assert error.value.place == "--data"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"validation_share": 1.0}, "not a share"),
        ({"validation_share": 0.1, "validation_data": "x"}, "held out, too"),
        ({"row_length": 1}, "predict nothing"),
        ({"text_documents": "page"}, "none of file, line, paragraph"),
        ({"validation_share": 0.5}, "too small to hold"),
        ({"validation_data": "/does/not/exist.txt"}, "does not exist"),
    ],
)
def test_settings_that_cannot_be_honoured(write_jsonl, options, problem) -> None:
    path = write_jsonl("rows.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match=problem):
        open_pretraining_data(path, **{"tokenizer": BYTE, "row_length": 8, **options})


# ── Validation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def open_data(data: Any, **options: Any) -> Any:
    return open_pretraining_data(data, **{"tokenizer": BYTE, "row_length": 64, **options})


def rows_of(loaders: list[Any]) -> list[tuple[list[int], list[int]]]:
    """The rows of all ranks that have anything to predict, in their overall order."""
    batches = [list(loader) for loader in loaders]
    assert len({len(found) for found in batches}) == 1  # no rank waits for another rank's collective
    together = [
        (ids, labels)
        for step in zip(*batches, strict=True)
        for batch in step
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    ]
    return [row for row in together if any(label != -100 for label in row[1])]


def test_validation_is_the_same_on_any_number_of_ranks(write_jsonl, texts) -> None:
    path = write_jsonl("rows.jsonl", [{"text": text} for text in texts])
    data = open_data(path, validation_share=0.02, isolate_documents=True)
    expected = rows_of([data.validation_loader(micro_batch_size=4)])
    assert len(expected) > 100
    for world_size, micro_batch_size in ((2, 3), (4, 8)):
        loaders = [
            data.validation_loader(micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert rows_of(loaders) == expected
        assert rows_of(loaders) == expected  # again, from memory
    assert rows_of([open_data(path, validation_share=0.02, seed=9).validation_loader(micro_batch_size=4)]) == expected
    some = data.validation_loader(micro_batch_size=4, max_rows=10)
    assert rows_of([some]) == expected[:10]
    batch = next(iter(some))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["labels"].dtype == torch.int64


def test_what_is_validated_on_is_never_trained_on(write_jsonl, texts) -> None:
    path = write_jsonl("rows.jsonl", [{"text": text} for text in texts])
    data = open_data(path, validation_share=0.05)
    validated = BYTE.decode(
        [token for ids, _ in rows_of([data.validation_loader(micro_batch_size=1)]) for token in ids]
    )
    held_out = set(validated.replace("<|pad|>", "").split(BYTE.eos_token)) - {""}
    trained = set(sample_texts(path, validation_share=0.05))
    assert held_out | trained == set(texts)
    assert not held_out & trained
    assert 0.02 < len(held_out) / len(texts) < 0.08
    facts = data.sources[0]
    seen = {
        int(block)
        for step, _ in zip(data.train_loader(global_batch_size=8, micro_batch_size=8), range(300), strict=False)
        for name in step.row_ids[0]
        for block in [name.split(":")[1]]
    }
    assert max(seen) < facts.num_blocks - facts.num_validation_blocks


def test_the_last_row_is_padded_and_data_of_its_own_can_be_named(tmp_path: Path, write_jsonl) -> None:
    train = write_jsonl("rows.jsonl", [{"text": "x" * 1000}])
    other = tmp_path / "other.txt"
    other.write_text("y" * 100)
    data = open_data(train, validation_data=str(other))
    (batch,) = list(data.validation_loader(micro_batch_size=4))
    assert batch["input_ids"].shape == (4, 64)
    assert (batch["labels"] != -100).sum(dim=1).tolist() == [63, 37, 0, 0]
    assert batch["labels"][1, 36] == BYTE.eos_token_id
    with pytest.raises(ConfigError, match="nothing to validate on"):
        open_data(train).validation_loader(micro_batch_size=1)


def test_tokens_are_estimated(write_jsonl, texts) -> None:
    path = write_jsonl("rows.jsonl", [{"text": text, "more": "x" * 50} for text in texts])
    estimate = open_data(path).estimate_tokens()
    assert not estimate.exact
    assert estimate.tokens == pytest.approx(sum(len(text) + 1 for text in texts), rel=0.05)
    assert json.dumps(estimate.tokens)
