"""Row formats: detected automatically or mapped by the user, and the rows that each one produces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_scale.data.bad_rows import UnusableRow
from accel_scale.data.columns import ROLES, parse_columns
from accel_scale.data.layout import Layout, detect_layout
from accel_scale.data.loading import load_training_data
from accel_scale.data.rows import RowConverter
from accel_scale.errors import ConfigError


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


QA = turns(("user", "q"), ("assistant", "a"))


@pytest.mark.parametrize(
    ("row", "source_format", "expected"),
    [
        ({"messages": QA, "id": 1}, "messages", {"messages": QA}),
        ({"conversations": QA}, "messages", {"messages": QA}),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 1}]},
            "sharegpt",
            {"messages": QA},
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            "sharegpt",
            {"messages": turns(("system", "s")) + QA},
        ),
        (
            {"messages": turns(("system", "own")) + QA, "system_prompt": "s"},
            "messages",
            {"messages": turns(("system", "own")) + QA},
        ),
        (
            {"messages": turns(("developer", "be brief"), ("user", "q"), ("model", "a"))},
            "messages",
            {"messages": turns(("system", "be brief")) + QA},
        ),
        ({"prompt": "q", "completion": "a"}, "prompt_completion", {"prompt": "q", "completion": "a"}),
        (
            {"prompt": "q", "completion": "a", "system": "s"},
            "prompt_completion",
            {"prompt": "s\n\nq", "completion": "a"},
        ),
        ({"prompt": QA[:1], "completion": QA[1:]}, "prompt_completion", {"prompt": QA[:1], "completion": QA[1:]}),
        (
            {"prompt": QA[:1], "completion": QA[1:], "system": "s"},
            "prompt_completion",
            {"prompt": turns(("system", "s")) + QA[:1], "completion": QA[1:]},
        ),
        (
            {"instruction": "add", "input": "1 2", "output": "3", "text": "### all of it"},
            "alpaca",
            {"prompt": turns(("user", "add\n\n1 2")), "completion": turns(("assistant", "3"))},
        ),
        (
            {"instruction": "add", "input": "", "output": "3"},
            "alpaca",
            {"prompt": turns(("user", "add")), "completion": turns(("assistant", "3"))},
        ),
        ({"instruction": "q", "output": "a"}, "alpaca", {"prompt": QA[:1], "completion": QA[1:]}),
        ({"text": "once", "source": "book"}, "text", {"text": "once"}),
        ({"messages": QA, "answer": 42}, "messages", {"messages": QA, "answer": "42"}),
        (
            {"prompt": "q", "completion": "a", "answer": "x"},
            "prompt_completion",
            {"prompt": "q", "completion": "a", "answer": "x"},
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_formats_found_by_themselves(row, source_format, expected, streaming, write_jsonl) -> None:
    data = load_training_data(write_jsonl("a.jsonl", [row]), streaming=streaming)
    assert data.source_formats == (source_format,)
    assert list(data.train) == [expected]
    assert data.format == (
        "messages" if "messages" in expected else "text" if "text" in expected else "prompt_completion"
    )
    main = expected.get("messages", expected.get("prompt"))
    assert data.conversational is isinstance(main, list)


def test_alpaca_for_a_model_without_chat_template(write_jsonl) -> None:
    rows = [
        {"instruction": "add", "input": "1 2", "output": "3"},
        {"instruction": "count", "input": "", "output": "1"},
        {"instruction": "sing", "input": "", "output": "la", "system": "You sing."},
    ]
    train = load_training_data(write_jsonl("a.jsonl", rows), chat=False).train
    assert train[0]["prompt"] == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n"
    )
    assert train[1]["prompt"] == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\ncount\n\n### Response:\n"
    )
    assert train[2]["prompt"] == "You sing.\n\n### Instruction:\nsing\n\n### Response:\n"
    assert train["completion"] == ["3", "1", "la"]


def test_answers_of_any_kind_become_text(write_jsonl) -> None:
    answers = [1, 2, -(2**70), 0.5, "x", True, None, [1, "b"]]
    rows = [{"prompt": "q", "completion": "a", "answer": answer} for answer in answers]
    expected = ["1", "2", str(-(2**70)), "0.5", "x", "true", None, '[1, "b"]']
    assert load_training_data(write_jsonl("a.jsonl", rows)).train["answer"] == expected
    # The sampled rows hold only whole numbers; other values follow.
    rows = [{"prompt": "q", "completion": "a", "answer": 7}] * 1000 + rows
    assert load_training_data(write_jsonl("b.jsonl", rows)).train["answer"] == ["7"] * 1000 + expected


def test_tool_calls_and_tools_go_through_whole(write_jsonl) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "1+2?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "name": "add", "content": "3"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": [{"name": "add"}],
        },
        {"messages": QA},
    ]
    for streaming in (False, True):
        data = load_training_data(write_jsonl("a.jsonl", rows), streaming=streaming)
        with_tools, plain = sorted(data.train, key=lambda row: row["tools"] is None)
        assert with_tools["messages"][1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}}],
        }
        assert with_tools["messages"][2] == {"role": "tool", "content": "3", "name": "add"}
        assert json.loads(with_tools["tools"]) == [{"name": "add"}]
        assert plain["messages"] == QA


def test_tool_calls_after_the_sampled_rows(write_jsonl) -> None:
    late = [*turns(("user", "q")), {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    path = write_jsonl("a.jsonl", [{"messages": QA}] * 1500 + [{"messages": late}])
    data = load_training_data(path)
    assert data.train[1500]["messages"][1]["tool_calls"] == [{"name": "f"}]
    assert data.train[0]["messages"] == QA
    with pytest.raises(ConfigError, match="too late for a stream"):
        list(load_training_data(path, streaming=True).train)


def test_typed_files_with_tool_calls_and_content_parts(tmp_path) -> None:
    from datasets import Dataset

    rows = [
        {
            "messages": [
                {"role": "user", "content": "q", "tool_calls": None},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"name": "f", "arguments": {"x": 1, "y": None}}],
                },
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "q", "tool_calls": None},
                {
                    "role": "assistant",
                    "content": "a",
                    "tool_calls": [{"name": "g", "arguments": {"x": None, "y": "2"}}],
                },
            ]
        },
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    train = load_training_data(str(tmp_path / "a.parquet")).train
    # Arrow gave both objects both keys; the keys that were not in the file are removed again.
    assert train[0]["messages"][1]["tool_calls"] == [{"name": "f", "arguments": {"x": 1}}]
    assert train[1]["messages"][1]["tool_calls"] == [{"name": "g", "arguments": {"y": "2"}}]
    assert train[1]["messages"][0] == {"role": "user", "content": "q"}
    parts = [{"messages": [{"role": r, "content": [{"type": "text", "text": r[0]}]} for r in ("user", "assistant")]}]
    Dataset.from_list(parts).to_parquet(str(tmp_path / "b.parquet"))
    assert load_training_data(str(tmp_path / "b.parquet")).train[0]["messages"] == turns(
        ("user", "u"), ("assistant", "a")
    )


def test_messages_written_as_json_text(tmp_path) -> None:
    import csv

    path = tmp_path / "a.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(QA)], ["[broken"]])
    data = load_training_data(str(path), on_bad_row="skip")
    assert data.train.to_list() == [{"messages": QA}]
    assert data.skipped_reasons == {"`messages` is text, not a list of turns": 1}


def test_columns_mapped(write_jsonl, shared_data) -> None:
    path = write_jsonl("a.jsonl", [{"question": "q", "reply": "a", "final": 7, "sys": "s"}])
    data = load_training_data(path, columns=["prompt=question", "completion=reply", "answer=final", "system=sys"])
    assert data.train.to_list() == [{"prompt": "s\n\nq", "completion": "a", "answer": "7"}]
    # Only the answer is mapped; the other columns are detected.
    path = write_jsonl("b.jsonl", [{"messages": QA, "final": 7}])
    assert load_training_data(path, columns=["answer=final"]).train.to_list() == [{"messages": QA, "answer": "7"}]
    data = load_training_data(
        str(shared_data / "gsm8k"), columns=["prompt=question", "completion=answer"], test_split="test"
    )
    assert (data.num_rows, len(data.test), data.format) == (7473, 1319, "prompt_completion")
    assert data.train[0]["prompt"].startswith("Natalia sold clips to 48 of her friends")
    assert data.train[0]["completion"].endswith("#### 72")
    assert data.train.column_names == ["prompt", "completion"]


def test_unrecognised_table_says_what_it_saw(shared_data) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_data(str(shared_data / "gsm8k"))
    assert "its columns are question (text), answer (text)" in caught.value.problem
    assert "--columns prompt=question completion=answer" in caught.value.fix


@pytest.mark.parametrize(
    ("columns", "problem", "fix"),
    [
        (["promt=question"], "'promt' is not a role", "did you mean prompt=question?"),
        (["zzz=question"], "'zzz' is not a role", "use one of messages, prompt, completion, text, system"),
        (["prompt=qestion", "completion=answer"], "no column 'qestion'", "did you mean prompt=question?"),
        (["prompt=zzz", "completion=answer"], "no column 'zzz'", "has the columns question, answer"),
        (["prompt"], "'prompt' is not role=column", "prompt=question"),
        (["prompt=question", "prompt=answer"], "mapped twice", "map it once"),
        (["prompt=question", "text=answer"], "prompt and text belong to different formats", "map messages, or"),
        (["messages=question"], "question (text) does not hold lists of turns", "make each row a list"),
        (["prompt=question"], "none of the known formats", "completion=answer"),
    ],
)
def test_columns_that_cannot_be(columns, problem, fix, write_jsonl) -> None:
    path = write_jsonl("a.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ConfigError) as caught:
        load_training_data(path, columns=columns)
    assert problem in caught.value.problem
    assert fix in caught.value.fix


def test_turns_in_the_prompt_only(write_jsonl) -> None:
    with pytest.raises(ConfigError, match="turns in one of 'prompt' and 'completion'"):
        load_training_data(write_jsonl("a.jsonl", [{"prompt": QA[:1], "completion": "a"}]))


def test_files_of_different_formats_in_a_folder(write_jsonl, tmp_path) -> None:
    write_jsonl("set/a.jsonl", [{"messages": QA}])
    write_jsonl("set/b.jsonl", [{"text": "t"}])
    with pytest.raises(ConfigError, match=r"b\.jsonl: it holds text rows, but .*a\.jsonl holds messages rows"):
        load_training_data(str(tmp_path / "set"))


def test_text_files_are_one_row_a_line(shared_data) -> None:
    path = shared_data / "tinyshakespeare" / "input.txt"
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert load_training_data(str(path)).train["text"] == lines


@given(st.dictionaries(st.sampled_from(ROLES), st.text("abc_", min_size=1, max_size=5), min_size=1))
def test_parse_columns_reads_what_it_is_given(mapping: dict[str, str]) -> None:
    groups = [{"messages"}, {"prompt", "completion"}, {"text"}]
    items = [f"{role}={column}" for role, column in mapping.items()]
    if sum(bool(group & set(mapping)) for group in groups) > 1:
        with pytest.raises(ConfigError):
            parse_columns(items)
    else:
        assert parse_columns(items) == mapping


@given(
    st.permutations(["question", "reply", "note", "score"]),
    st.sampled_from(["question", "reply", "note", "score"]),
    st.sampled_from(["question", "reply", "note", "score"]),
)
def test_any_two_columns_can_be_mapped_in_any_order(names, prompt, completion) -> None:
    layout = detect_layout("x", [dict.fromkeys(names, "v")], mapping={"prompt": prompt, "completion": completion})
    assert (layout.column("prompt"), layout.column("completion")) == (prompt, completion)
    assert layout.features().keys() == {"prompt", "completion"}


def test_the_keys_of_turns_are_what_most_rows_begin_with() -> None:
    from accel_scale.data.turns import as_turns, is_rich, turn_keys_of

    ours, theirs = ("role", "content"), ("from", "value")
    for rows, keys in (
        ([[{"value": "q"}, {"role": "assistant"}]], theirs),
        ([[{"content": "q"}, {"from": "gpt"}]], ours),
        ([[{"from": "human"}]], theirs),
        ([[{"from": "human"}], [{"role": "user"}], [{"role": "user"}]], ours),
        ([[{"from": "human"}], "text", "text"], None),
        (['[{"from": "human"}]', None, []], theirs),
        ([["text"], [{"speaker": "a"}]], None),
        ([], None),
    ):
        assert turn_keys_of([{"c": value} for value in rows], "c") == keys, rows
    assert as_turns(" [1]") == [1]
    assert as_turns("[1") is as_turns("text") is as_turns({"role": "user"}) is as_turns(None) is None
    assert is_rich([{"role": "user"}, {"tool_calls": [1]}])
    assert not is_rich([{"role": "user", "tool_calls": []}, "text"])
    assert not is_rich(None)


PAIR = (("prompt", "question"), ("chosen", "good"), ("rejected", "bad"), ("system", "role"))


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (PAIR, {"question": "q", "good": "a", "bad": "b"}, {"prompt": "q", "chosen": "a", "rejected": "b"}),
        (
            PAIR,
            {"question": "q", "good": "a", "bad": "b", "role": "s"},
            {"prompt": "s\n\nq", "chosen": "a", "rejected": "b"},
        ),
        (
            PAIR,
            {"question": "q", "good": "a", "bad": "b", "role": " "},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        (PAIR[1:], {"good": "a", "bad": "b", "role": "s"}, {"chosen": "a", "rejected": "b"}),
        (PAIR, {"question": "q", "good": "a"}, "`bad` is missing or empty"),
        (PAIR, {"question": "", "good": "a", "bad": "b"}, "`question` is missing or empty"),
    ],
)
def test_pairs_of_text(columns, row, expected) -> None:
    convert = RowConverter(Layout("preference", columns, target="preference"))
    if isinstance(expected, str):
        with pytest.raises(UnusableRow, match=expected):
            convert(row)
    else:
        assert convert(row) == expected


def test_pairs_of_turns_share_the_instructions_of_their_opening() -> None:
    convert = RowConverter(Layout("preference", PAIR, ("role", "content"), target="preference"))
    good, bad = turns(("assistant", "a")), turns(("assistant", "b"))
    row = {"question": turns(("user", "q")), "good": good, "bad": bad, "role": "s"}
    assert convert(row) == {"prompt": turns(("system", "s"), ("user", "q")), "chosen": good, "rejected": bad}
    with pytest.raises(UnusableRow, match="no assistant turn in `good`"):
        convert({**row, "good": turns(("user", "q"))})


def test_what_a_turn_holds() -> None:
    layout = Layout("messages", (("messages", "m"), ("tools", "t")), ("role", "content"), extras=("tools",))
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    row = {
        "m": [
            {"role": "system", "content": None},
            '{"role": "human", "content": "q"}',
            {"role": "gpt", "content": parts, "name": "", "tool_calls": None},
            {"role": "observation", "content": " "},
        ],
        "t": [{"a": None, "b": [{"c": None, "d": 1}]}],
    }
    expected = turns(("system", ""), ("user", "q"), ("assistant", "abc"), ("tool", " "))
    assert RowConverter(layout)(row) == {"messages": expected, "tools": '[{"b": [{"d": 1}]}]'}
    with pytest.raises(UnusableRow) as caught:
        RowConverter(layout)({"m": [{"role": "user", "content": "ab\ud83d"}]})
    assert (caught.value.reason, caught.value.detail) == (
        "not valid Unicode", "`content` of a turn in `m`, character 3",
    )  # fmt: skip
    with pytest.raises(UnusableRow) as caught:
        RowConverter(layout)({"m": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]})
    assert (caught.value.reason, caught.value.detail) == ("a turn in `m` has content that is not text", "image")
