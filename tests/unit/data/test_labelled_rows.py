"""Answers that carry a label each: columns, labels from any file format, refusals, and the embedded rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Value

from accel_scale.data.default import default_labelled, default_pairs
from accel_scale.data.loading import check_local_data, load_training_data
from accel_scale.errors import ConfigError

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, [], {"prompt": "q", "completion": "a", "label": True}),
        (
            {"question": "q", "reply": "a", "good": 0, "system": "s"},
            ["prompt=question", "completion=reply", "label=good"],
            {"prompt": "s\n\nq", "completion": "a", "label": False},
        ),
        (
            {"prompt": [QUESTION], "completion": [ANSWER], "label": False, "rating": 3},
            [],
            {"prompt": [QUESTION], "completion": [ANSWER], "label": False},
        ),
        (
            {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], "kto_tag": True},
            ["label=kto_tag"],
            {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER], "label": True},
        ),
        (
            {"turns": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "label": "False"},
            ["messages=turns"],
            {"prompt": [QUESTION], "completion": [ANSWER], "label": False},
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_labelled_rows_become(
    row: dict[str, Any], columns: list[str], expected: dict[str, Any], streaming: bool, tmp_path: Path
) -> None:
    data = load_training_data(
        written(tmp_path / "rows.jsonl", row), columns=columns, rows_with="labels", streaming=streaming
    )
    assert next(iter(data.train)) == expected
    assert data.train.features["label"] == Value("bool")
    assert (data.format, data.conversational) == ("labelled", isinstance(expected["prompt"], list))


def test_labels_of_files_without_types_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion,label\nq,a,1\nq,b,FALSE\nq,c,true\n")
    assert load_training_data(str(tmp_path / "rows.csv"), rows_with="labels").train["label"] == [True, False, True]


def test_tool_calls_go_through_whole_in_every_kind_of_preference(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    labelled = written(tmp_path / "labelled.jsonl", {"prompt": [QUESTION], "completion": [call], "label": True})
    assert load_training_data(labelled, rows_with="labels").train[0]["completion"] == [call]
    pairs = written(tmp_path / "pairs.jsonl", {"prompt": [QUESTION], "chosen": [call], "rejected": [ANSWER]})
    assert load_training_data(pairs, rows_with="pairs").train[0]["chosen"] == [call]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "completion": "a", "label": 0.5}, r"rows.jsonl:1: `label` is neither true nor false"),
        ({"prompt": "q", "completion": "a", "label": None}, r"rows.jsonl:1: `label` is neither .*it is empty"),
        ({"prompt": "q", "completion": "", "label": True}, "`completion` is missing or empty"),
        ({"messages": [QUESTION, ANSWER, QUESTION], "label": True}, "no question and the assistant's answer"),
        ({"messages": [ANSWER], "label": True}, "no question and the assistant's answer"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_training_data(written(tmp_path / "rows.jsonl", row), rows_with="labels")


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"prompt": "q", "completion": "a"}, "label=is_good"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "train on pairs with recipes/dpo.py"),
        ({"messages": "q", "label": True}, "lists of turns"),
    ],
)
def test_other_rows_are_refused_before_the_libraries(row: dict[str, Any], fix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_local_data(written(tmp_path / "rows.jsonl", row), rows_with="labels")
    assert fix in refused.value.one_line()


def test_text_and_turns_do_not_mix(tmp_path: Path) -> None:
    one = written(tmp_path / "text.jsonl", {"prompt": "q", "completion": "a", "label": True})
    other = written(tmp_path / "turns.jsonl", {"prompt": [QUESTION], "completion": [ANSWER], "label": True})
    with pytest.raises(ConfigError, match="turns in one and text in the other"):
        load_training_data(mixture=[f"{one}=0.5", f"{other}=0.5"], rows_with="labels")


def test_embedded_answers_are_those_of_the_pairs_in_another_order(tmp_path: Path) -> None:
    def lines(path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(path).read_text().splitlines()]

    pairs, labelled = lines(default_pairs(str(tmp_path))), lines(default_labelled(str(tmp_path)))
    assert len(labelled) == 2 * len(pairs)
    good = {(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in labelled if row["label"]}
    assert good == {(pair["prompt"][0]["content"], pair["chosen"][0]["content"]) for pair in pairs}
    shares = [sum(row["label"] for row in labelled[at : at + 400]) / 400 for at in range(0, 4000, 400)]
    assert all(0.4 < share < 0.6 for share in shares), "both kinds come everywhere"
    neighbours = itertools.pairwise(labelled)
    assert sum(one["prompt"] == other["prompt"] for one, other in neighbours) < 10
    assert Path(default_labelled(str(tmp_path))).name == "labelled.jsonl"
    assert Path(default_labelled(str(tmp_path), heldout=True)).name == "heldout_labelled.jsonl"
