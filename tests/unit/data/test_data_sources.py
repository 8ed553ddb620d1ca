"""Sources: which are local, which are hub ids, and which files belong to which split."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.ipc
import pytest

from accel_scale.data.bad_rows import SkipLog
from accel_scale.data.loading import load_training_data
from accel_scale.data.sources import canonical_split, file_kind, find_source, looks_local
from accel_scale.errors import ConfigError

ROW = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("data/train.jsonl", True),
        ("train.json.gz", True),
        ("./folder", True),
        ("../up", True),
        ("~/data", True),
        ("/abs", True),
        ("a/b/c", True),
        ("data/*", True),
        ("tatsu-lab/alpaca", False),
        ("squad", False),
        ("openai/gsm8k", False),
        ("HuggingFaceH4/ultrachat_200k", False),
    ],
)
def test_what_looks_local(name: str, local: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert looks_local(name) is local


def test_first_part_is_a_folder_here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    assert looks_local("data/trian")
    assert not looks_local("date/train")


def test_misspelt_path_names_the_nearest(write_jsonl, tmp_path) -> None:
    write_jsonl("data/train.jsonl", [ROW])
    write_jsonl("data/other.jsonl", [ROW])
    with pytest.raises(ConfigError) as caught:
        load_training_data(str(tmp_path / "data" / "trian.jsonl"))
    assert caught.value.fix == f"did you mean {tmp_path}/data/train.jsonl?"
    with pytest.raises(ConfigError) as caught:
        load_training_data(str(tmp_path / "dta" / "train.jsonl"))
    assert caught.value.fix == f"did you mean {tmp_path}/data?"


def test_a_local_looking_path_never_reaches_the_hub(monkeypatch) -> None:
    import datasets

    def refuse(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ConfigError, match="does not exist"):
        load_training_data("nowhere/train.jsonl")
    with pytest.raises(AssertionError, match="the hub was asked"):
        load_training_data("nobody/nothing")


def test_hub_out_of_reach_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="not in the current folder, and the hub") as caught:
        load_training_data("accel-scale-tests/no-such-data-set")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["https://example.com/a", "a b", "user/name!"])
def test_neither_path_nor_hub_id(name: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a local path nor a hub id|does not exist"):
        find_source(name)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.jsonl", "jsonl"),
        ("a.JSONL.gz", "jsonl"),
        ("a.ndjson.zst", "jsonl"),
        ("a.json", "json"),
        ("a.tsv", "csv"),
        ("a.parquet", "parquet"),
        ("a.parquet.gz", None),
        ("a.txt.bz2", "text"),
        ("a.md", None),
        ("a", None),
    ],
)
def test_file_kind(path: str, kind: str | None) -> None:
    assert file_kind(path) == kind


def test_folder_splits_by_file_and_folder_names(write_jsonl, tmp_path) -> None:
    for name in ("train-a.jsonl", "train-b.jsonl", "dev.jsonl", "eval/part1.jsonl"):
        write_jsonl(f"set/{name}", [ROW])
    (tmp_path / "set" / "README.md").write_text("no data")
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    source = find_source(str(tmp_path / "set"))
    found = {split: [os.path.basename(f) for f in files] for split, files in source.splits}
    assert found == {
        "train": ["train-a.jsonl", "train-b.jsonl"],
        "validation": ["dev.jsonl"],
        "test": ["part1.jsonl"],
    }
    assert source.files("valid") == source.files("validation")
    assert canonical_split("training") == "train"


def test_shards_name_their_split(write_jsonl, tmp_path) -> None:
    for split in ("train_sft", "test_sft"):
        for shard in range(2):
            write_jsonl(f"set/data/{split}-{shard:05d}-of-00002.jsonl", [{"prompt": split, "completion": str(shard)}])
    data = load_training_data(str(tmp_path / "set"), split="train_sft", test_split="test_sft")
    assert data.train["prompt"] == ["train_sft"] * 2
    assert data.test["completion"] == ["0", "1"]
    with pytest.raises(ConfigError, match="has no split 'train'; it has 'test_sft', 'train_sft'"):
        load_training_data(str(tmp_path / "set"))


def test_a_folder_without_split_names_is_all_train(write_jsonl, tmp_path) -> None:
    write_jsonl("set/a.jsonl", [ROW, ROW])
    write_jsonl("set/sub/b.jsonl", [ROW])
    assert load_training_data(str(tmp_path / "set")).num_rows == 3


def test_a_single_file_or_pattern_is_train_whatever_its_name(write_jsonl, tmp_path) -> None:
    path = write_jsonl("test_0.jsonl", [ROW])
    write_jsonl("test_1.jsonl", [ROW])
    assert load_training_data(path).num_rows == 1
    assert load_training_data(str(tmp_path / "test_*.jsonl")).num_rows == 2


def test_a_pattern_keeps_test_files_out_of_training(write_jsonl, tmp_path) -> None:
    write_jsonl("train.jsonl", [ROW] * 3)
    write_jsonl("test.jsonl", [ROW])
    data = load_training_data(str(tmp_path / "*.jsonl"), test_split="test")
    assert (len(data.train), len(data.test)) == (3, 1)


def test_missing_split_and_slices(write_jsonl) -> None:
    path = write_jsonl("a.jsonl", [{"prompt": str(i), "completion": "a"} for i in range(20)])
    with pytest.raises(ConfigError, match="has no split 'test'; it has 'train'"):
        load_training_data(path, test_split="test")
    data = load_training_data(path, split="train[:90%]", test_split="train[90%:]")
    assert data.train["prompt"] == [str(i) for i in range(18)]
    assert data.test["prompt"] == ["18", "19"]
    with pytest.raises(ConfigError, match="is not a split"):
        load_training_data(path, split="train[a:b]")
    with pytest.raises(ConfigError, match="cannot be cut"):
        load_training_data(path, split="train[:90%]", streaming=True)


def test_sum_of_splits(write_jsonl, tmp_path) -> None:
    write_jsonl("set/train.jsonl", [ROW] * 3)
    write_jsonl("set/val.jsonl", [ROW] * 2)
    assert load_training_data(str(tmp_path / "set"), split="train+validation").num_rows == 5
    assert load_training_data(str(tmp_path / "set"), split="train+validation[:1]").num_rows == 4


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "csv.gz"])
def test_every_kind_of_file_gives_the_same_rows(extension: str, tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"prompt": f"q{i}, “é”\n2", "completion": f'say "{i}"', "id": str(i)} for i in range(25)]
    path = tmp_path / f"a.{extension}"
    table = pa.Table.from_pylist(rows)
    if extension == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif extension == "arrow":
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        import csv
        import io

        buffer = io.StringIO()
        if extension.startswith(("csv", "tsv")):
            writer = csv.DictWriter(buffer, rows[0], delimiter="\t" if extension == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
        elif extension == "json":
            json.dump(rows, buffer, indent=1)
        else:
            buffer.writelines(json.dumps(row) + "\n" for row in rows)
        data = buffer.getvalue().encode()
        path.write_bytes(gzip.compress(data) if extension.endswith(".gz") else data)
    stream = load_training_data(str(path), streaming=True, shuffle_buffer_rows=1).train
    assert [row["completion"] for row in stream] == [row["completion"] for row in rows]
    loaded = load_training_data(str(path))
    assert loaded.train.column_names == ["prompt", "completion"]
    assert loaded.train.to_list() == [{"prompt": r["prompt"], "completion": r["completion"]} for r in rows]


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_saved_data_set(tmp_path, as_dict: bool, streaming: bool) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"instruction": f"do {i}", "input": "", "output": str(i), "id": i} for i in range(5)])
    saved = DatasetDict({"train": rows, "test": rows.select([0])}) if as_dict else rows
    saved.save_to_disk(str(tmp_path / "saved"))
    data = load_training_data(str(tmp_path / "saved"), test_split="test" if as_dict else None, streaming=streaming)
    assert sorted(row["completion"][0]["content"] for row in data.train) == list("01234")
    assert next(iter(data.train)).keys() == {"prompt", "completion"}
    assert (data.test is not None) is as_dict
    if not as_dict:
        with pytest.raises(ConfigError, match="has no split 'test'"):
            load_training_data(str(tmp_path / "saved"), test_split="test")


def test_one_of_source_and_mixture(write_jsonl) -> None:
    path = write_jsonl("a.jsonl", [ROW])
    for arguments in ({}, {"source": path, "mixture": [f"{path}=1"]}):
        with pytest.raises(ConfigError, match=r"both given|no data set was named"):
            load_training_data(**arguments)
    with pytest.raises(ConfigError, match="has no configurations"):
        load_training_data(path, config="main")


def test_broken_files_say_so(tmp_path) -> None:
    for name in ("a.parquet", "a.arrow", "a.jsonl.gz"):
        path = tmp_path / name
        path.write_bytes(b"not what the extension says" * 10)
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            load_training_data(str(path))
        assert caught.value.place == str(path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ConfigError, match="no row that can be read"):
        load_training_data(str(empty))
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(ConfigError, match="not a kind of file"):
        load_training_data(str(tmp_path / "a.md"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="has no data files"):
        load_training_data(str(tmp_path / "folder"))


def test_second_load_comes_from_the_cache_and_changes_are_seen(write_jsonl, own_cache) -> None:
    path = write_jsonl("a.jsonl", [ROW, "broken"])
    first = load_training_data(path, on_bad_row="skip")
    written = first.train.cache_files[0]["filename"]
    stamp = os.stat(written).st_mtime_ns
    again = load_training_data(path, on_bad_row="skip")
    assert os.stat(again.train.cache_files[0]["filename"]).st_mtime_ns == stamp
    assert again.skipped_rows == first.skipped_rows == 1
    assert again.train._fingerprint == first.train._fingerprint  # so every rank finds `map` results in the cache again
    write_jsonl("a.jsonl", [ROW, ROW, ROW])
    assert load_training_data(path, on_bad_row="skip").num_rows == 3
    # A failed load leaves nothing behind but its lock.
    write_jsonl("b.jsonl", [ROW, "broken"])
    folders = {p for p in (own_cache / "accel_scale").iterdir() if p.is_dir()}
    with pytest.raises(ConfigError):
        load_training_data(path.replace("a.jsonl", "b.jsonl"))
    assert {p for p in (own_cache / "accel_scale").iterdir() if p.is_dir()} == folders


@pytest.mark.parametrize("streaming", [False, True])
def test_data_sets_of_the_library_with_splits_and_configurations(write_jsonl, tmp_path, streaming) -> None:
    """`datasets.load_dataset` opens a local folder just as it opens a hub repository, including its errors."""
    from accel_scale.data.opened import _Library
    from accel_scale.data.sources import Source

    for config in ("main", "extra"):
        write_jsonl(f"repo/{config}/train.jsonl", [{"prompt": config, "completion": "a"}] * 3)
        write_jsonl(f"repo/{config}/test.jsonl", [{"prompt": config, "completion": "a"}])
    (tmp_path / "repo" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.jsonl}\n"
        "  - {split: test, path: main/test.jsonl}\n- config_name: extra\n  data_files: extra/train.jsonl\n---\n"
    )
    repo = str(tmp_path / "repo")
    opened = _Library(Source(repo, "hub", config="main"), "train", streaming)
    layout = opened.layout({}, chat=True)
    if streaming:
        rows = list(opened.stream(layout, "test", "error", SkipLog.temporary()))
    else:
        rows = opened.rows(layout, "test", "error")[0].to_list()
    assert rows == [{"prompt": "main", "completion": "a"}]
    with pytest.raises(ConfigError, match="has no split 'dev'; it has 'train', 'test'"):
        _Library(Source(repo, "hub", config="main"), "dev", streaming).column_names()
    for config in (None, "mian"):
        with pytest.raises(ConfigError, match="main") as caught:
            _Library(Source(repo, "hub", config=config), "train", streaming).column_names()
        assert caught.value.place == "--dataset_config"


def test_a_later_file_may_lack_an_extra_column(tmp_path) -> None:
    from datasets import Dataset

    for kind in ("parquet", "arrow"):
        folder = tmp_path / kind
        folder.mkdir()
        for name, row in (("a", {**ROW, "answer": "1"}), ("b", ROW)):
            if kind == "parquet":
                Dataset.from_list([row]).to_parquet(str(folder / f"{name}.parquet"))
            else:
                table = Dataset.from_list([row]).data.table
                with pyarrow.ipc.new_file(str(folder / f"{name}.arrow"), table.schema) as writer:
                    writer.write_table(table)
        assert load_training_data(str(folder)).train["answer"] == ["1", None]


def test_what_a_killed_process_left_is_cleared(write_jsonl, own_cache) -> None:
    path = write_jsonl("a.jsonl", [ROW])
    key = Path(load_training_data(path).train.cache_files[0]["filename"]).parent
    leftover = key.with_name(f"{key.name}.abcd")
    key.rename(leftover)
    (leftover / "rows.arrow").write_bytes(b"half")
    assert load_training_data(path).num_rows == 1
    assert sorted(found.name for found in key.parent.iterdir()) == [key.name, f"{key.name}.lock"]


_LOAD = """
import sys, datasets
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
from accel_scale.data.loading import load_training_data
data = load_training_data(sys.argv[1], on_bad_row="skip")
print(data.num_rows, data.skipped_rows, data.train._fingerprint)
"""


@pytest.mark.slow
def test_processes_that_load_at_once_write_once_and_agree(write_jsonl, own_cache) -> None:
    path = write_jsonl("a.jsonl", [ROW] * 20_000 + ["broken"])
    command = [sys.executable, "-c", _LOAD, path, str(own_cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=120)[0] for process in running}
    assert len(answers) == 1
    assert answers.pop().startswith("20000 1 ")
    folders = [found for found in (own_cache / "accel_scale").iterdir() if found.is_dir()]
    assert len(folders) == 1
