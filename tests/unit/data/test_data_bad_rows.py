"""Bad rows: named by file and line, refused or skipped and counted, and never at the expense of good rows."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scale.data.bad_rows import BadRowPolicy, SkipLog
from accel_scale.data.layout import detect_layout
from accel_scale.data.loading import load_training_data
from accel_scale.data.reading import read_rows
from accel_scale.data.spans import Span, lines_of, spans_of
from accel_scale.errors import ConfigError

QA = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
GOOD = {"messages": QA}


def messages(*pairs: tuple[str | None, object]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


# (a bad row, its reason)
BAD_MESSAGES = [
    ('{"messages": [', "not valid JSON"),
    ("not json", "not valid JSON"),
    (b'{"messages": "\xff\xfe"}', "not valid UTF-8"),
    ("[1, 2]", "not an object with columns"),
    ("17", "not an object with columns"),
    ("null", "`messages` is missing or empty"),
    ({}, "`messages` is missing or empty"),
    ({"messages": None}, "`messages` is missing or empty"),
    ({"messages": []}, "`messages` is missing or empty"),
    ({"messages": 5}, "`messages` is a number, not a list of turns"),
    ({"messages": "hello"}, "`messages` is text, not a list of turns"),
    ({"messages": ["hello"]}, "a turn in `messages` is text, not an object"),
    (messages(("user", "q"), ("bot", "a")), "a turn with the unknown role 'bot' in `messages`"),
    (messages(("user", "q"), (None, "a")), "a turn without a role in `messages`"),
    (messages(("user", "q"), ("assistant", "")), "a turn without content in `messages`"),
    (messages(("user", " \n"), ("assistant", "a")), "a turn without content in `messages`"),
    (messages(("user", "q"), ("assistant", None)), "a turn without content in `messages`"),
    (messages(("user", "q"), ("assistant", 5)), "`content` of a turn in `messages` is a number, not text"),
    (messages(("user", "q")), "no assistant turn in `messages`"),
    (
        messages(("user", [{"type": "image_url", "image_url": "x"}]), ("assistant", "a")),
        "a turn in `messages` has content that is not text",
    ),
    (
        '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "a"}]}',
        "not valid Unicode",
    ),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("bad", "reason"), BAD_MESSAGES)
def test_each_fault_is_named_with_file_and_line(bad, reason, streaming, write_jsonl) -> None:
    path = write_jsonl("data/train.jsonl", [GOOD, "", GOOD, bad, GOOD])
    data = load_training_data(path, on_bad_row="skip", streaming=streaming)
    assert [row["messages"] for row in data.train] == [QA] * 3
    assert data.skipped_reasons == {reason: 1}
    assert data.skipped_rows == 1
    with pytest.raises(ConfigError) as caught:
        list(load_training_data(path, streaming=streaming).train)
    assert caught.value.place == f"{path}:4"
    assert reason in caught.value.problem
    assert "--on_bad_row skip" in caught.value.fix


def test_the_error_counts_the_others_and_skipping_tallies_all(write_jsonl) -> None:
    rows = [row for bad, _ in BAD_MESSAGES for row in (GOOD, bad)]
    path = write_jsonl("train.jsonl", rows)
    with pytest.raises(ConfigError, match=f"{len(BAD_MESSAGES) - 1} other bad rows in this file") as caught:
        load_training_data(path)
    assert caught.value.place == f"{path}:2"
    data = load_training_data(path, on_bad_row="skip")
    assert data.num_rows == len(BAD_MESSAGES)
    assert data.skipped_reasons == dict(Counter(reason for _, reason in BAD_MESSAGES))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q"}, "`completion` is missing or empty"),
        ({"prompt": "q", "completion": "  "}, "`completion` is missing or empty"),
        ({"prompt": None, "completion": "a"}, "`prompt` is missing or empty"),
        ({"prompt": "q", "completion": 4}, "`completion` is a number, not text"),
        ({"prompt": ["q"], "completion": "a"}, "`prompt` is a list, not text"),
        ({"prompt": "q", "completion": True}, "`completion` is true or false, not text"),
        ({"prompt": "q", "completion": {"a": 1}}, "`completion` is an object, not text"),
    ],
)
def test_faults_of_plain_rows(row, reason, write_jsonl) -> None:
    path = write_jsonl("a.jsonl", [{"prompt": "q", "completion": "a"}, row])
    with pytest.raises(ConfigError) as caught:
        load_training_data(path)
    assert (caught.value.place, caught.value.problem) == (f"{path}:2", f"{reason}.")


def test_json_lists_go_on_after_a_broken_element(tmp_path) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "meta": [{"x": 1}]} for i in range(6)]
    lines = [json.dumps(row) for row in rows]
    lines[2] = lines[2].replace('"completion"', "completion")
    lines[4] = json.dumps({"prompt": "q4", "completion": ""})
    path = tmp_path / "a.json"
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    data = load_training_data(str(path), on_bad_row="skip")
    assert data.train["prompt"] == ["q0", "q1", "q3", "q5"]
    assert data.skipped_reasons == {"not valid JSON": 1, "`completion` is missing or empty": 1}
    with pytest.raises(ConfigError, match="1 other bad row in") as caught:
        load_training_data(str(path))
    assert caught.value.place == f"{path}:4"
    path.write_text("[" + ",".join(lines))  # a single line with one broken element, never closed
    data = load_training_data(str(path), on_bad_row="skip")
    assert data.train["prompt"] == ["q0", "q1", "q3", "q5"]
    assert data.skipped_reasons["not valid JSON"] == 2


def test_json_lists_name_bad_bytes(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"prompt": "q", "completion": "a"},\n {"prompt": "q", "completion": "\xff"}]')
    data = load_training_data(str(path), on_bad_row="skip")
    assert (data.num_rows, data.skipped_reasons) == (1, {"not valid Unicode": 1})


def test_one_object_is_not_rows(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "data": [{"text": "t"}]}, indent=1))
    with pytest.raises(ConfigError, match=r"one JSON object \(with 'version', 'data'\), not rows"):
        load_training_data(str(path))
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert load_training_data(str(path)).train["text"] == ["a", "b"]


def test_csv_faults_with_quoted_line_ends(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'prompt,completion,note\n"two\nlines",a,n\nq,b,n\nq,c\nq,d,n,extra\nq,,n\nq,\xff,n\n\n"x\n\ny",e,n\n'
    )
    data = load_training_data(str(path), on_bad_row="skip")
    assert data.train.to_list() == [
        {"prompt": "two\nlines", "completion": "a"},
        {"prompt": "q", "completion": "b"},
        {"prompt": "x\n\ny", "completion": "e"},
    ]
    assert data.skipped_reasons == {
        "wrong number of fields": 2,
        "`completion` is missing or empty": 1,
        "not valid UTF-8": 1,
    }
    with pytest.raises(ConfigError) as caught:
        load_training_data(str(path))
    assert caught.value.place == f"{path}:5"
    assert caught.value.problem == "wrong number of fields (2, the header has 3); 3 other bad rows in this file."


def test_csv_line_numbers_on_the_fast_path(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"1\n\n1",a\n2,b\n3,\n')
    with pytest.raises(ConfigError, match="`completion` is missing or empty") as caught:
        load_training_data(str(path))
    assert caught.value.place == f"{path}:6"


def test_parquet_rows_are_named_by_number(tmp_path) -> None:
    from datasets import Dataset

    path = str(tmp_path / "a.parquet")
    Dataset.from_dict({"prompt": ["q"] * 4, "completion": ["a", "", "b", None]}).to_parquet(path)
    with pytest.raises(ConfigError, match="1 other bad row in") as caught:
        load_training_data(path)
    assert caught.value.place == f"{path}: row 2"
    assert load_training_data(path, on_bad_row="skip").train["completion"] == ["a", "b"]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_saved_data_sets(streaming, tmp_path) -> None:
    from datasets import Dataset

    bad = [{"role": "user", "content": "q"}, {"role": "bot", "content": "a"}]
    folder = str(tmp_path / "saved")
    Dataset.from_dict({"messages": [QA, bad, QA]}).save_to_disk(folder)
    with pytest.raises(ConfigError) as caught:
        list(load_training_data(folder, streaming=streaming).train)
    assert caught.value.place == f"{folder}: row 2"
    data = load_training_data(folder, streaming=streaming, on_bad_row="skip")
    assert [row["messages"] for row in data.train] == [QA, QA]
    assert data.skipped_reasons == {"a turn with the unknown role 'bot' in `messages`": 1}


def test_text_with_bad_bytes(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\n\xff\xfe\nthree\n")
    data = load_training_data(str(path), on_bad_row="skip")
    assert data.train["text"] == ["one", "three"]
    with pytest.raises(ConfigError) as caught:
        load_training_data(str(path))
    assert caught.value.place == f"{path}:3"


def test_nothing_left(write_jsonl) -> None:
    path = write_jsonl("a.jsonl", [{"text": ""}, {"text": " "}])
    with pytest.raises(ConfigError, match=r"no row of .* can be used"):
        load_training_data(path, on_bad_row="skip")
    with pytest.raises(ConfigError, match="is not a choice"):
        load_training_data(path, on_bad_row="ignore")


def test_a_skipped_row_counts_once_however_often_it_is_read(write_jsonl) -> None:
    data = load_training_data(write_jsonl("a.jsonl", [GOOD, "x"]), streaming=True, on_bad_row="skip")
    assert data.skipped_rows == 0
    for _epoch in range(3):
        assert len(list(data.train)) == 1
    assert data.skipped_rows == 1


LINES = st.one_of(
    st.sampled_from(
        [json.dumps(GOOD), "", "  ", '{"messages":', "5", '{"answer": 3}', '{"messages": [{"role": "user"}]}']
    ),
    st.builds(
        lambda role, content: json.dumps(
            {"messages": [{"role": "user", "content": content}, {"role": role, "content": "a"}]}
        ),
        st.sampled_from(["assistant", "gpt", "bot", "", None, 3]),
        st.one_of(st.none(), st.text(max_size=6), st.integers()),
    ),
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(lines=st.lists(LINES, max_size=12), part_bytes=st.integers(1, 200))
def test_a_file_and_its_parts_agree(lines: list[str], part_bytes: int, tmp_path_factory) -> None:
    path = str(tmp_path_factory.mktemp("lines") / "a.jsonl")
    with open(path, "w") as file:
        file.write("\n".join([json.dumps(GOOD), *lines]))
    layout = detect_layout("x", [GOOD])

    def read(spans: list[Span]) -> tuple[list, dict]:
        log = SkipLog.temporary()
        tables = [table for span in spans for table in read_rows(span, layout, BadRowPolicy("skip", log))]
        with open(log.path) as file:
            bad = sorted((row["place"], row["reason"]) for row in map(json.loads, file))
        return [row for table in tables for row in table.to_pylist()], bad

    assert read(spans_of(path, span_bytes=part_bytes)) == read([Span(path)])


def test_parts_of_a_file_are_whole_lines_and_none_is_empty(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    for lines, starts in (
        ([9, 9, 9, 9], [0, 20]),
        ([15, 24], [0, 16]),
        ([9, 29], [0]),  # the cut would fall at the end of the file
        ([38], [0]),
        ([9, 9], [0]),  # too short for two spans
    ):
        path.write_bytes(b"".join(b"x" * length + b"\n" for length in lines))
        assert [span.start for span in spans_of(str(path), span_bytes=15)] == starts, lines
        joined = [line for span in spans_of(str(path), span_bytes=15) for line in lines_of(span)]
        assert [len(line) - 1 for line in joined] == lines
