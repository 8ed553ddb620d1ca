"""Mixtures: weights become shares of the drawn rows, identical for everyone who uses the same seed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scale.data.loading import load_training_data
from accel_scale.data.mixture import mix, parse_mixture, shares
from accel_scale.errors import ConfigError

QA = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture
def sources(write_jsonl) -> list[str]:
    """Three files of 4000 rows; a row's completion names its file."""
    rows = {
        name: [{"prompt": f"{name}{i}", "completion": name} for i in range(4000)] for name in ("one", "two", "three")
    }
    return [write_jsonl(f"{name}.jsonl", content) for name, content in rows.items()]


def share_of(rows: list[str], name: str) -> float:
    return rows.count(name) / len(rows)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("weights", [(0.7, 0.3), (7, 3), (1, 1), (0.02, 0.08)])
def test_weights_are_shares_of_the_rows_drawn(sources, weights, streaming) -> None:
    mixture = [f"{path}={weight}" for path, weight in zip(sources, weights, strict=False)]
    data = load_training_data(mixture=mixture, streaming=streaming, shuffle_buffer_rows=200)
    drawn = [row["completion"] for row in (data.train.take(4000) if streaming else data.train)]
    expected = weights[0] / sum(weights)
    # Four standard deviations of a share of n draws.
    assert abs(share_of(drawn, "one") - expected) < 4 * math.sqrt(expected * (1 - expected) / len(drawn))
    assert data.sources == tuple(sources[:2])


@pytest.mark.parametrize("streaming", [False, True])
def test_no_row_is_drawn_twice_and_the_first_source_to_run_out_ends_it(sources, streaming) -> None:
    data = load_training_data(mixture=[f"{sources[0]}=0.8", f"{sources[1]}=0.2"], streaming=streaming)
    prompts = [row["prompt"] for row in data.train]
    assert len(prompts) == len(set(prompts))
    drawn_one = sum(prompt.startswith("one") for prompt in prompts)
    assert 3990 <= drawn_one <= 4000
    # Streams are shuffled through a buffer and files as a whole; either way rows do not come in file order.
    ones = [int(prompt[3:]) for prompt in prompts if prompt.startswith("one")]
    assert ones != sorted(ones)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_same_seed_gives_the_same_rows(sources, streaming) -> None:
    mixture = [f"{path}={weight}" for path, weight in zip(sources, (1, 2, 3), strict=True)]

    def draw(seed: int) -> list[str]:
        data = load_training_data(mixture=mixture, streaming=streaming, seed=seed, shuffle_buffer_rows=200)
        return [row["prompt"] for row in data.train.take(200)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0.05, 10), min_size=2, max_size=5), st.integers(0, 2**31))
def test_shares_converge(weights: list[float], seed: int) -> None:
    from datasets import Dataset

    num_rows = 2000
    parts = [Dataset.from_dict({"source": [index] * num_rows}) for index in range(len(weights))]
    items = parse_mixture([f"s{index}.jsonl={weight!r}" for index, weight in enumerate(weights)])
    wanted = shares(items)
    assert sum(wanted) == pytest.approx(1)
    drawn = mix(parts, wanted, seed=seed)[:]["source"]
    for index, share in enumerate(wanted):
        # Five standard deviations: one draw in two million fails by chance, and hypothesis keeps what failed.
        assert abs(drawn.count(index) / len(drawn) - share) < 5 * math.sqrt(share * (1 - share) / len(drawn))


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8})?", fullmatch=True), st.floats(1e-6, 1e6)),
        min_size=1,
        max_size=5,
        unique_by=lambda item: item[0],
    )
)
def test_parse_mixture_reads_what_it_is_given(pairs) -> None:
    items = parse_mixture([f"{name}={weight!r}" for name, weight in pairs])
    assert [(item.name, item.weight) for item in items] == pairs


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ("a.jsonl b.jsonl=0.5", "'a.jsonl' has no weight"),
        ("a.jsonl=0", "is not a number above 0"),
        ("a.jsonl=-1", "is not a number above 0"),
        ("a.jsonl=nan", "is not a number above 0"),
        ("a.jsonl=inf", "is not a number above 0"),
        ("a.jsonl=half", "is not a number above 0"),
        ("=0.5", "has no weight"),
    ],
)
def test_bad_weights(item: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_mixture(item.split())
    assert caught.value.place == "--dataset_mixture"
    assert caught.value.fix


@pytest.mark.parametrize("streaming", [False, True])
def test_without_weights_all_rows_come_once(write_jsonl, streaming) -> None:
    sizes = {"a": 3, "b": 40, "c": 5}
    rows = {name: [{"prompt": f"{name}{n}", "completion": "yes"} for n in range(size)] for name, size in sizes.items()}
    paths = [str(write_jsonl(f"{name}.jsonl", content)) for name, content in rows.items()]
    data = load_training_data(mixture=paths, streaming=streaming, shuffle_buffer_rows=1)
    assert data.num_rows == (None if streaming else 48)
    found, wanted = [row["prompt"] for row in data.train], [row["prompt"] for part in rows.values() for row in part]
    assert (sorted(found) if streaming else found) == (sorted(wanted) if streaming else wanted)


def test_names_configurations_and_repeats() -> None:
    items = parse_mixture(["openai/gsm8k:main=0.3", "dir/odd=name.jsonl=2", "openai/gsm8k:socratic=1"])
    assert [(item.name, item.config) for item in items] == [
        ("openai/gsm8k", "main"),
        ("dir/odd=name.jsonl", None),
        ("openai/gsm8k", "socratic"),
    ]
    (partition,) = parse_mixture(["rows/date=2026/part"])  # the "=" in a folder's name does not start a weight
    assert (partition.name, partition.weight) == ("rows/date=2026/part", None)
    with pytest.raises(ConfigError, match="named twice"):
        parse_mixture(["a.jsonl=1", "a.jsonl=2"])


@pytest.mark.parametrize("streaming", [False, True])
def test_formats_are_brought_together_as_messages(write_jsonl, streaming) -> None:
    tool = [*QA, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    paths = [
        write_jsonl("messages.jsonl", [{"messages": QA, "answer": 1}] * 50),
        write_jsonl("plain.jsonl", [{"prompt": "q", "completion": "a", "system": "s"}] * 50),
        write_jsonl("alpaca.jsonl", [{"instruction": "q", "input": "", "output": "a"}] * 50),
        write_jsonl("turns.jsonl", [{"prompt": QA[:1], "completion": QA[1:]}] * 50),
        write_jsonl("tools.jsonl", [{"messages": tool}] * 50),
    ]
    data = load_training_data(mixture=[f"{path}=1" for path in paths], streaming=streaming)
    assert (data.format, data.conversational) == ("messages", True)
    seen = {str(row["messages"]): row["answer"] for row in data.train}
    assert seen == {str(QA): seen[str(QA)], str([{"role": "system", "content": "s"}, *QA]): None, str(tool): None}
    answers = {row["answer"] for row in data.train if row["messages"] == QA}
    assert answers == {"1", None}


def test_alike_formats_stay_as_they_are(write_jsonl) -> None:
    plain = [write_jsonl(f"{name}.jsonl", [{"prompt": name, "completion": "a"}] * 9) for name in "ab"]
    data = load_training_data(mixture=[f"{path}=1" for path in plain])
    assert (data.format, data.conversational) == ("prompt_completion", False)


def test_plain_text_does_not_mix_with_questions(write_jsonl) -> None:
    paths = [write_jsonl("t.jsonl", [{"text": "t"}]), write_jsonl("m.jsonl", [{"messages": QA}])]
    with pytest.raises(ConfigError, match=r"t\.jsonl is plain text, which has no turns"):
        load_training_data(mixture=[f"{path}=1" for path in paths])


def test_mapped_columns_apply_where_they_exist(write_jsonl) -> None:
    mapped = write_jsonl("m.jsonl", [{"question": "q", "reply": "a"}] * 20)
    other = write_jsonl("o.jsonl", [{"prompt": "p", "completion": "c"}] * 20)
    another = write_jsonl("n.jsonl", [{"prompt": "p", "completion": "c"}] * 20)
    mixture = [f"{mapped}=1", f"{other}=1"]
    data = load_training_data(mixture=mixture, columns=["prompt=question", "completion=reply"])
    assert {row["prompt"] for row in data.train} == {"q", "p"}
    with pytest.raises(ConfigError, match="no source of the mixture has all the columns qestion, reply"):
        load_training_data(mixture=[f"{other}=1", f"{another}=1"], columns=["prompt=qestion", "completion=reply"])


def test_test_rows_of_a_mixture(write_jsonl, tmp_path) -> None:
    write_jsonl("set/train.jsonl", [{"prompt": "p", "completion": "c"}] * 5)
    write_jsonl("set/test.jsonl", [{"prompt": "t", "completion": "c"}] * 3)
    other = write_jsonl("o.jsonl", [{"prompt": "o", "completion": "c"}] * 5)
    mixture = [f"{tmp_path / 'set'}=1", f"{other}=1"]
    assert load_training_data(mixture=mixture, test_split="test").test["prompt"] == ["t"] * 3
    with pytest.raises(ConfigError, match="has no split 'validation'"):
        load_training_data(mixture=mixture, test_split="validation")


def test_skipped_rows_of_all_sources_are_tallied(write_jsonl) -> None:
    row = {"prompt": "p", "completion": "c"}
    paths = [write_jsonl("a.jsonl", [row] * 9 + ["x"]), write_jsonl("b.jsonl", [row] * 9 + ["x", {"prompt": "q"}])]
    data = load_training_data(mixture=[f"{path}=1" for path in paths], on_bad_row="skip")
    assert data.skipped_reasons == {"not valid JSON": 2, "`completion` is missing or empty": 1}
