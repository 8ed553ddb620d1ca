"""Blocks of text files: every document is in exactly one block, wherever the cuts are; faults are named by line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scale.data.pretraining import text_files
from accel_scale.data.pretraining.blocks import block_size
from accel_scale.data.pretraining.text_files import ContinuousText, JsonLines, TextLines
from accel_scale.errors import ConfigError

PIECES = st.lists(
    st.sampled_from(["a", "bc ", "\n", "\n\n", "\n \t\n", " ", "\r\n", "é", "\U0001f600", "word" * 9]), max_size=200
)
RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@RELAXED
@given(pieces=PIECES, step=st.integers(1, 60), bom=st.booleans())
def test_lines_and_paragraphs_belong_to_one_block(tmp_path: Path, pieces: list[str], step: int, bom: bool) -> None:
    content = "".join(pieces).encode()
    path = tmp_path / "text.txt"
    path.write_bytes((text_files.BOM if bom else b"") + content)
    size = path.stat().st_size
    expected = {
        text_files._lines: [line.strip(b"\r") for line in content.split(b"\n") if line.strip()],
        text_files._paragraphs: [
            part.strip(b"\r\n") for part in re.split(rb"\n(?:[ \t\r]*\n)+", content) if part.strip()
        ],
    }
    for split, documents in expected.items():
        whole = split(str(path), 0, size, size)
        parts = [span for at in range(0, size, step) for span in split(str(path), at, min(size, at + step), size)]
        assert parts == whole
        assert [text for _, text in whole] == documents


@RELAXED
@given(texts=st.lists(PIECES, min_size=1, max_size=4), repeat=st.integers(1, 400))
def test_continuous_text_is_cut_without_losing_anything(tmp_path: Path, texts: list[list[str]], repeat: int) -> None:
    contents = ["".join(pieces) * repeat for pieces in texts]
    if not any(contents):
        return
    paths = []
    for index, content in enumerate(contents):
        paths.append(tmp_path / f"{index}.txt")
        paths[-1].write_bytes(content.encode())
    source = ContinuousText([str(path) for path in paths])
    blocks = [source.read(block) for block in range(source.num_blocks)]
    fragments, ends = [], 0
    for block in blocks:
        for index, text in enumerate(block.texts):
            fragments.append(text)
            ends += block.ends or index < len(block) - 1
    assert "".join(fragments) == "".join(contents)
    assert ends == sum(bool(content) for content in contents)  # each file ends once


def test_cuts_fall_between_lines_or_words(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words on a line\n" * 40_000)
    source = ContinuousText([str(path)])
    assert source.num_blocks > 40
    assert all(source.read(block).texts[0].endswith("line\n") for block in range(source.num_blocks))
    path.write_text("word " * 100_000)
    source = ContinuousText([str(path)])
    assert all(source.read(block).texts[0].startswith(" word") for block in range(1, source.num_blocks))


@pytest.mark.parametrize(
    ("total", "continuous", "size"),
    [
        (10**12, False, 256 << 10),
        (1 << 28, False, 64 << 10),
        (1 << 24, False, 16 << 10),
        (1 << 18, False, 4 << 10),
        (1000, False, 1 << 10),
        (1000, True, 4 << 10),
    ],
)
def test_block_sizes(total: int, continuous: bool, size: int) -> None:
    assert block_size(total, continuous=continuous) == size


def test_json_lines_across_files_and_null_texts(write_jsonl) -> None:
    rows = [{"text": f"row {index} " + "x" * (index % 700), "other": index} for index in range(900)]
    rows[5]["text"] = None
    rows[6]["text"] = ""
    paths = [write_jsonl(f"{part}.jsonl", rows[part::3]) for part in range(3)]
    source = JsonLines(paths, "text")
    found = [text for block in range(source.num_blocks) for text in source.read(block).texts]
    assert found == [row["text"] for part in range(3) for row in rows[part::3] if row["text"]]
    block = source.num_blocks // 2
    path, line = source.place(block, 1).rsplit(":", 1)
    assert json.loads(Path(path).read_text().splitlines()[int(line) - 1])["text"] == source.read(block).texts[1]


@pytest.mark.parametrize(
    ("lines", "place", "problem"),
    [
        (['{"body": "x", "id": 1}'], ":1", "no column 'text'; it has 'body', 'id'"),
        (['{"text": "x"}', '{"text": "x"'], ":2", "not valid JSON"),
        (['{"text": "x"}', "", '{"text": 3}'], ":3", "holds int '3', not text"),
        (['{"text": "x"}', '["x"]'], ":2", "the line is no object"),
        (['{"text": "x"}', b'{"text": "\xff"}'], ":2", "not valid UTF-8"),
    ],
)
def test_faults_are_named_by_line(write_jsonl, lines, place, problem) -> None:
    path = write_jsonl("bad.jsonl", lines)
    with pytest.raises(ConfigError) as error:
        JsonLines([path], "text").read(0)
    assert error.value.place == path + place
    assert problem in error.value.problem


def test_a_text_that_is_not_utf8_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(ConfigError, match="byte 9 is not valid UTF-8") as error:
        TextLines([str(path)], paragraphs=False).read(0)
    assert error.value.place == f"{path}:2"


def test_documents_that_are_no_documents_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_DOCUMENT_BYTES", 100_000)
    path = tmp_path / "endless.txt"
    path.write_text("no line end " * 100_000)
    with pytest.raises(ConfigError, match="--text_documents file"):
        TextLines([str(path)], paragraphs=False).read(0)
