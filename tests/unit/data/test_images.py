"""Rows with images: how image columns are found, where images are placed, and the rows TRL gets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from accel_scale.data.bad_rows import UnusableRow
from accel_scale.data.image_batches import decoded
from accel_scale.data.images import content_parts, is_blank_content, show_images
from accel_scale.data.loading import load_training_data
from accel_scale.errors import ConfigError


def picture(path: Path) -> str:
    Image.new("RGB", (8, 8), (200, 10, 10)).save(path)
    return path.name


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def image() -> dict[str, str]:
    return {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("question", "parts"),
    [
        ("What?", [image(), text("What?")]),
        ("<image>\nWhat?", [image(), text("What?")]),
        ("What?\n<image>", [text("What?"), image()]),
        ("In <image> what?", [text("In "), image(), text(" what?")]),
        ([text("What?"), {"type": "image", "text": None}], [text("What?"), image()]),
        (["What?", {"type": "image"}], [text("What?"), image()]),
    ],
)
def test_images_are_shown_where_the_turn_says_else_first(question: Any, parts: list[Any], tmp_path: Path) -> None:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "Red."}]
    row = {"messages": turns, "images": [picture(tmp_path / "a.png")]}
    data: Any = load_training_data(written(tmp_path / "rows.jsonl", row), rows_with="images")
    assert data.train[0]["messages"] == [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [text("Red.")]},
    ]
    (found,) = data.train[0]["images"]
    assert found == {"bytes": None, "path": str(tmp_path / "a.png"), "place": f"{tmp_path}/rows.jsonl:1"}


def test_llavas_rows_and_a_single_image_under_another_name(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Red."}]
    for column, flags in (("image", []), ("file_name", []), ("photo", ["images=photo"])):
        path = written(tmp_path / f"{column}.jsonl", {"conversations": turns, column: picture(tmp_path / "a.png")})
        data: Any = load_training_data(path, rows_with="images", columns=flags)
        assert data.train[0]["messages"][0] == {"role": "user", "content": [image(), text("What?")]}
        assert len(data.train[0]["images"]) == 1


@pytest.mark.parametrize("turns", [True, False])
def test_prompts_and_completions_stay_apart(turns: bool, tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "What?", "completion": "Red.", "system": "Look."}
    if turns:
        row |= {
            "prompt": [{"role": "user", "content": "What?"}],
            "completion": [{"role": "assistant", "content": "Red."}],
        }
    path = written(tmp_path / "rows.jsonl", {**row, "image": picture(tmp_path / "a.png")})
    data: Any = load_training_data(path, rows_with="images")
    assert (data.format, data.conversational) == ("prompt_completion", True)
    assert data.train[0]["prompt"] == [
        {"role": "system", "content": [text("Look.")]},
        {"role": "user", "content": [image(), text("What?")]},
    ]
    assert data.train[0]["completion"] == [{"role": "assistant", "content": [text("Red.")]}]


def test_bytes_of_a_parquet_file_and_of_a_saved_data_set(tmp_path: Path) -> None:
    from datasets import Dataset, Features, Value
    from datasets import Image as Column

    held = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(held, "PNG")
    row = {"prompt": "What?", "completion": "Red.", "image": {"bytes": held.getvalue(), "path": "a.png"}}
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    features = Features({"prompt": Value("string"), "completion": Value("string"), "image": Column()})
    Dataset.from_list([row], features=features).save_to_disk(tmp_path / "saved")
    for name in ("rows.parquet", "saved"):
        data: Any = load_training_data(str(tmp_path / name), rows_with="images")
        (found,) = data.train[0]["images"]
        assert found["bytes"] == held.getvalue()
        assert found["place"] == f"{tmp_path / name}: row 1"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "What?", "completion": "Red."}, "has no column of images"),
        ({"text": "Red.", "image": "a.png"}, "no question to show an image in"),
        ({"prompt": "What?", "completion": "Red.", "image": "a.png", "tools": "[]"}, "tools"),
    ],
)
def test_tables_that_show_no_images_are_refused(row: dict[str, str], named: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=named):
        load_training_data(written(tmp_path / "rows.jsonl", row), rows_with="images")


def test_an_image_in_an_answer_is_refused() -> None:
    row = {
        "prompt": [{"role": "user", "content": "What?"}],
        "completion": [{"role": "assistant", "content": "<image>"}],
    }
    with pytest.raises(UnusableRow, match="shown in an answer"):
        show_images(row, 1)


@pytest.mark.parametrize("part", [5, {"type": "video"}, {"type": "text"}, {"type": "image", "url": "https://x"}])
def test_parts_that_are_none_are_refused(part: object) -> None:
    with pytest.raises(UnusableRow):
        content_parts([part], "messages")


def test_a_mixture_of_two_kinds_of_rows_is_shown_alike(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}]
    one = written(tmp_path / "one.jsonl", {"messages": turns, "images": [picture(tmp_path / "a.png")]})
    other = written(tmp_path / "other.jsonl", {"prompt": "What?", "completion": "Red.", "image": "a.png"})
    data: Any = load_training_data(mixture=[one, other], rows_with="images")
    assert [row["messages"][0]["content"] for row in data.train] == [[image(), text("What?")]] * 2


def test_a_turn_of_nothing_but_an_image_says_something(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": [image()]}, {"role": "assistant", "content": "Red."}]
    row = {"messages": turns, "images": [picture(tmp_path / "a.png")]}
    data: Any = load_training_data(written(tmp_path / "rows.jsonl", row), rows_with="images")
    assert data.train[0]["messages"][0]["content"] == [image()]
    assert is_blank_content([text(" "), text("")])
    assert not is_blank_content([text(" "), image()])


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_a_file_that_was_cut_off_since_is_named_when_it_is_shown(name: str, tmp_path: Path) -> None:
    """The file's header is intact, so it can still be opened as an image."""
    path = tmp_path / name
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="can no longer be read") as refused:
        decoded({"bytes": None, "path": str(path), "place": "rows:1"})
    assert refused.value.place == "rows:1"
