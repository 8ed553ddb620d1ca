"""Prepared data has the raw data's rows, even after a kill or a full disk, and nothing else passes for it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_scale.cli.main import main
from accel_scale.data.pretraining import (
    load_pretraining_tokenizer,
    open_pretraining_data,
    prepare,
    prepare_data,
    sample_texts,
    train_tokenizer,
)
from accel_scale.data.pretraining.prepared import is_prepared
from accel_scale.errors import ConfigError

BYTE = load_pretraining_tokenizer("byte")
FORK = multiprocessing.get_context("fork")  # a process that can be killed, without importing everything again


@pytest.fixture
def rows(write_jsonl, monkeypatch: pytest.MonkeyPatch) -> str:
    """Enough rows for several shards, which are made small."""
    monkeypatch.setattr(prepare, "_MIN_SHARD_BYTES", 64 << 10)
    draw = random.Random(4)
    words = ["".join(draw.choices("abcdefgh", k=draw.randrange(1, 8))) for _ in range(300)]
    texts = [" ".join(draw.choices(words, k=draw.randrange(60))) for _ in range(3000)]
    return write_jsonl("rows.jsonl", [{"text": text} for text in texts])


def open_data(data: Any, tokenizer: Any = BYTE, **options: Any) -> Any:
    return open_pretraining_data(
        data, **{"tokenizer": tokenizer, "row_length": 128, "isolate_documents": True, **options}
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.bin"))}


def test_training_from_prepared_data_takes_the_same_rows_in_the_same_order(tmp_path: Path, rows: str) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {index} of the book.\n" for index in range(9000)))
    data = [f"{rows}=0.7", f"{book}=0.3"]
    tokenizer = train_tokenizer(sample_texts(data, max_bytes=300_000), 600)
    done = prepare_data(data, tokenizer=tokenizer, output_dir=str(tmp_path / "prepared"), num_workers=2)
    found = []
    for source in (data, str(tmp_path / "prepared")):
        opened = open_data(source, tokenizer, validation_share=0.02)
        loader = opened.train_loader(global_batch_size=16, micro_batch_size=4)
        steps = [next(loader) for _ in range(40)]
        batches = [
            [values.tolist() for batch in step.micro_batches for values in batch.values()] + [step.row_ids]
            for step in steps
        ]
        validation = [batch["labels"].tolist() for batch in opened.validation_loader(micro_batch_size=8, max_rows=40)]
        found.append((batches, loader.state_dict(), validation))
    assert found[0] == found[1]
    estimate = opened.estimate_tokens()
    assert estimate.exact
    assert estimate.tokens < done.num_tokens < 1.05 * estimate.tokens
    name = found[0][0][3][-1][0][0]
    texts = [open_data(source, tokenizer).row_text(name) for source in (data, str(tmp_path / "prepared"))]
    assert texts[0].split("\n")[1] == texts[1].split("\n")[1]


def test_the_manifest_says_what_it_is(tmp_path: Path, rows: str) -> None:
    done = prepare_data(rows, tokenizer=BYTE, output_dir=str(tmp_path / "prepared"), num_workers=1)
    manifest = json.loads((tmp_path / "prepared" / "manifest.json").read_text())
    texts = [json.loads(line)["text"] for line in Path(rows).read_text().splitlines()]
    documents = [text for text in texts if text]
    assert done.num_tokens == manifest["num_tokens"] == sum(len(text) + 1 for text in documents)
    assert done.num_documents == len(documents)
    assert manifest["dtype"] == "<u2"
    assert set(manifest["versions"]) >= {"accel-scale", "tokenizers"}
    assert len(manifest["sources"][0]["shards"]) == done.num_shards > 2
    tokens = np.fromfile(tmp_path / "prepared" / "source-000" / "shard-00000" / "tokens.bin", dtype="<u2")
    assert bytes(tokens[: len(documents[0])].astype("u1")).decode() == documents[0]
    assert load_pretraining_tokenizer(str(tmp_path / "prepared" / "tokenizer"))("é")["input_ids"] == [0xC3, 0xA9]


@pytest.mark.slow
def test_large_vocabularies_take_four_bytes(tmp_path: Path, write_jsonl) -> None:
    tokenizer = load_pretraining_tokenizer("byte")
    tokenizer.add_tokens([f"<extra {index}>" for index in range(65_300)])
    path = write_jsonl("rows.jsonl", [{"text": "some <extra 65299> text"}])
    prepare_data(path, tokenizer=tokenizer, output_dir=str(tmp_path / "prepared"), num_workers=1)
    step = next(open_data(str(tmp_path / "prepared"), tokenizer).train_loader(global_batch_size=1, micro_batch_size=1))
    assert 258 + 65_299 in step.micro_batches[0]["input_ids"][0].tolist()


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, rows: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prepare_data(rows, tokenizer=BYTE, output_dir=str(whole), num_workers=1)
    arguments = {"tokenizer": BYTE, "output_dir": str(killed), "num_workers": 1}
    process = FORK.Process(target=prepare_data, args=(rows,), kwargs=arguments)
    process.start()
    shards = killed / "source-000"
    while not list(shards.glob("shard-*")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    finished = {path.parent.name: path.stat().st_mtime_ns for path in shards.glob("shard-*/tokens.bin")}
    assert not (killed / "manifest.json").exists()
    with pytest.raises(ConfigError, match="not prepared to the end"):
        open_data(str(killed))
    done = prepare_data(rows, tokenizer=BYTE, output_dir=str(killed), num_workers=2)
    assert 0 < done.num_kept_shards < done.num_shards
    assert files_of(killed) == files_of(whole)
    again = {path.parent.name: path.stat().st_mtime_ns for path in shards.glob("shard-*/tokens.bin")}
    assert again | finished == again  # shards that were kept are not rewritten
    assert not list(shards.glob("partial-*"))
    assert prepare_data(rows, tokenizer=BYTE, output_dir=str(killed)).num_kept_shards == done.num_shards


def _prepare_with_little_room(rows: str, folder: str, answer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    try:
        prepare_data(rows, tokenizer=BYTE, output_dir=folder, num_workers=2)
    except ConfigError as error:
        answer.put(error.one_line())


def test_a_full_disk_is_said_and_finished_shards_are_kept(tmp_path: Path, rows: str) -> None:
    """No file may grow as large as a shard's tokens: the error differs from a full disk's only in its number."""
    answer = FORK.SimpleQueue()
    process = FORK.Process(target=_prepare_with_little_room, args=(rows, str(tmp_path / "prepared"), answer))
    process.start()
    process.join()
    message = answer.get()
    assert "no space left" in message
    assert os.strerror(errno.EFBIG) in message
    assert "run the same command again" in message
    assert not list((tmp_path / "prepared").glob("source-*/partial-*"))
    assert prepare_data(rows, tokenizer=BYTE, output_dir=str(tmp_path / "prepared")).num_tokens > 10**5


def test_what_was_prepared_for_another_run_is_refused(tmp_path: Path, write_jsonl) -> None:
    path = write_jsonl("rows.jsonl", [{"text": f"text {index}"} for index in range(2000)])
    folder = str(tmp_path / "prepared")
    prepare_data(path, tokenizer=BYTE, output_dir=folder, num_workers=1)
    other = train_tokenizer(["some text"], 280)
    with pytest.raises(ConfigError, match="prepared with another tokenizer"):
        open_data(folder, other)
    with pytest.raises(ConfigError, match="started with something else: the tokenizer changed"):
        prepare_data(path, tokenizer=other, output_dir=folder)
    write_jsonl("rows.jsonl", [{"text": "changed"}] * 2000)
    with pytest.raises(ConfigError, match="started with something else: the data changed"):
        prepare_data(path, tokenizer=BYTE, output_dir=folder)
    with pytest.raises(ConfigError, match="is prepared already"):
        prepare_data(folder, tokenizer=BYTE, output_dir=str(tmp_path / "again"))
    with pytest.raises(ConfigError, match="has other things in it"):
        prepare_data(path, tokenizer=BYTE, output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="has tokens and no text"):
        next(sample_texts(folder))


def test_a_folder_is_known_by_its_plan_and_by_its_manifest(tmp_path: Path) -> None:
    for names in ([], ["plan.json"], ["manifest.json"], ["plan.json", "manifest.json"]):
        folder = tmp_path / "-".join(["of", *names])
        folder.mkdir()
        for name in names:
            (folder / name).write_text("{}")
        assert is_prepared(str(folder)) == bool(names)


def test_damaged_shards_are_found(tmp_path: Path, write_jsonl) -> None:
    path = write_jsonl("rows.jsonl", [{"text": f"text {index}"} for index in range(2000)])
    folder = tmp_path / "prepared"
    prepare_data(path, tokenizer=BYTE, output_dir=str(folder), num_workers=1)
    tokens = folder / "source-000" / "shard-00000" / "tokens.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(ConfigError, match="bytes instead of") as error:
        open_data(str(folder))
    assert error.value.place == str(tokens)
    tokens.write_bytes(content[:100] + b"\x00" + content[101:])
    with pytest.raises(ConfigError, match="checksum differs"):
        prepare_data(path, tokenizer=BYTE, output_dir=str(folder))


def test_the_command(tmp_path: Path, write_jsonl, capsys: pytest.CaptureFixture) -> None:
    path = write_jsonl("rows.jsonl", [{"body": f"text {index}"} for index in range(50)])
    command = [
        "prepare",
        "--data",
        path,
        "--tokenizer",
        "char",
        "--output",
        str(tmp_path / "out"),
        "--num_workers",
        "1",
    ]
    with pytest.raises(SystemExit):
        main(command)
    assert "no column 'text'; it has 'body'" in capsys.readouterr().err
    assert main([*command, "--text_column", "body"]) == 0
    captured = capsys.readouterr()
    assert "390 in 50 documents" in captured.out
    assert "preparing" in captured.err
    tokenizer = load_pretraining_tokenizer(str(tmp_path / "out" / "tokenizer"))
    assert open_data(str(tmp_path / "out"), tokenizer).estimate_tokens().tokens == 390
