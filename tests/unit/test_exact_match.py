"""Exact match on the embedded base model: batching, distribution over ranks, counting, refusals."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from accel_scale.data.default import default_dataset, default_model_path
from accel_scale.errors import ConfigError
from accel_scale.training.evaluation.exact_match import _greedy_config, exact_match, normalize_answer


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(default_model_path())


@pytest.fixture(scope="module")
def questions():
    return default_dataset()[1].to_list()[:200]


@pytest.fixture(scope="module")
def sayings():
    """Prompts that the base model completes and ends by itself: plain statements of solved problems, cut short."""
    texts = ["12 + 7 =", "The reverse of QXKD is", "In m, 12.50 km are", "The largest of 12, 93, 55, 31 is", "KLMN ="]
    texts += [f"{a} plus {a + 3} is" for a in range(10, 25)]
    return [{"prompt": text, "answer": "unknown", "task": "a" if i % 2 else "b"} for i, text in enumerate(texts)]


def test_base_model_hardly_answers(model, tokenizer, questions):
    result = exact_match(model, tokenizer, questions, batch_size=100, max_new_tokens=24)
    assert result.num_questions == 200
    assert result.accuracy <= 0.10  # it solves a third of the unit conversions
    assert set(result.tasks) == {row["task"] for row in questions}
    assert sum(score.num_correct for score in result.tasks.values()) == result.num_correct


@pytest.mark.slow
def test_batched_answers_equal_unbatched_ones(model, tokenizer, sayings):
    def predicted(batch_size):
        options = {"batch_size": batch_size, "max_new_tokens": 12, "num_examples": 100}
        return [example.predicted for example in exact_match(model, tokenizer, sayings, **options).examples]

    alone = predicted(1)
    assert predicted(7) == predicted(100) == alone
    assert len(set(alone)) > 10


def test_counts_exactly_the_equal_answers(model, tokenizer, sayings):
    said = exact_match(model, tokenizer, sayings, max_new_tokens=12, num_examples=100)
    assert said.num_correct == 0
    rows = [
        {**row, "answer": f" {e.predicted.strip().rstrip('.').upper()}. "}
        for row, e in zip(sayings, said.examples, strict=True)
    ]
    rows[3]["answer"] += "x"
    rows[4]["answer"] = "x" + rows[4]["answer"]
    result = exact_match(model, tokenizer, rows, max_new_tokens=12, num_examples=100)
    assert result.num_correct == len(rows) - 2
    assert [e.correct for e in result.examples] == [i not in (3, 4) for i in range(len(rows))]
    assert result.tasks["a"].num_correct == result.tasks["a"].num_questions - 1 == 9


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_questions(model, tokenizer, sayings, world_size):
    rows = sayings[:11]
    whole = exact_match(model, tokenizer, rows, max_new_tokens=8, num_examples=100)
    shares = [
        exact_match(model, tokenizer, rows, max_new_tokens=8, num_examples=100, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert sum(share.num_questions for share in shares) == whole.num_questions == 11
    answered = sorted((e.question, e.predicted) for share in shares for e in share.examples)
    assert answered == sorted((e.question, e.predicted) for e in whole.examples)


def test_reduce_sums_the_counts(model, tokenizer, sayings):
    result = exact_match(
        model, tokenizer, sayings[:4], max_new_tokens=2, rank=0, world_size=2, reduce=lambda counts: counts * 2
    )
    assert result.num_questions == 4
    assert {name: score.num_questions for name, score in result.tasks.items()} == {"a": 0, "b": 4}


def test_leaves_model_and_its_generation_config_as_they_were(model, tokenizer, sayings):
    before = model.generation_config.to_dict()
    model.train()
    exact_match(model, tokenizer, sayings[:2], max_new_tokens=2)
    assert model.training
    model.eval()
    exact_match(model, tokenizer, sayings[:2], max_new_tokens=2)
    assert not model.training
    assert model.generation_config.to_dict() == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_decoding_ignores_the_models_own_sampling_settings(model, tokenizer, sayings):
    greedy = exact_match(model, tokenizer, sayings, max_new_tokens=8, num_examples=100)
    saved = model.generation_config.to_dict()
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    sampled = exact_match(model, tokenizer, sayings, max_new_tokens=8, num_examples=100)
    model.generation_config.update(**{key: saved[key] for key in ("do_sample", "temperature", "repetition_penalty")})
    assert sampled.examples == greedy.examples


@pytest.mark.parametrize(("pad", "filled"), [(3, 3), (0, 0), (None, 5)])
def test_plain_greedy_decoding_is_asked_for(pad, filled):
    named = SimpleNamespace(eos_token_id=7, pad_token_id=pad)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[9, 5]))
    config = _greedy_config(model, named, 4)
    plain = {"max_new_tokens": 4, "do_sample": False, "num_beams": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
    plain |= {"repetition_penalty": 1.0, "use_cache": True, "eos_token_id": [5, 7, 9], "pad_token_id": filled}
    assert {name: getattr(config, name) for name in plain} == plain
    named.eos_token_id, model.generation_config.eos_token_id = None, 2
    assert _greedy_config(model, named, 4).eos_token_id == [2]
    model.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match="names an end token"):
        _greedy_config(model, named, 4)


@pytest.mark.parametrize(
    ("left", "right"), [("42", " 42. "), ("Ana", "ana"), ("12, 33", "12,  33\n"), ("07:25", "07:25."), ("a.b", "A.B")]
)
def test_answers_that_count_as_equal(left, right):
    assert normalize_answer(left) == normalize_answer(right)


@pytest.mark.parametrize(("left", "right"), [("42", "-42"), ("4.2", "42"), ("12, 33", "33, 12"), ("42", "42 m")])
def test_answers_that_do_not(left, right):
    assert normalize_answer(left) != normalize_answer(right)


@pytest.mark.parametrize(
    ("row", "words"),
    [({"answer": "4"}, "no prompt"), ({"prompt": "2 + 2 ="}, "no expected answer")],
)
def test_unusable_rows_are_refused(model, tokenizer, row, words):
    with pytest.raises(ConfigError, match=words):
        exact_match(model, tokenizer, [row])


def test_messages_need_a_chat_template(model, tokenizer, questions):
    plain = AutoTokenizer.from_pretrained(default_model_path())
    plain.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        exact_match(model, plain, questions[:1])


def test_pairs_expect_the_better_answer(model, tokenizer):
    turn, better = {"role": "user", "content": "12 + 7 ="}, {"role": "assistant", "content": "19"}
    worse = {"role": "assistant", "content": "20"}
    rows = [
        {"prompt": "12 + 7 =", "chosen": " 19", "rejected": " 20"},
        {"prompt": [turn], "chosen": [better], "rejected": [worse]},
        {"chosen": [turn, better], "rejected": [turn, worse]},
    ]
    seen = [(example.question, example.expected) for example in exact_match(model, tokenizer, rows).examples]
    assert seen == [("12 + 7 =", " 19"), ("12 + 7 =", "19"), ("12 + 7 =", "19")]


def test_prompt_completion_rows(model, tokenizer):
    turn = [{"role": "user", "content": "12 + 7 ="}]
    rows = [
        {"prompt": "12 + 7 =", "completion": " 19"},
        {"prompt": turn, "completion": [{"role": "assistant", "content": "19"}]},
        {"messages": [*turn, {"role": "assistant", "content": "19"}]},
    ]
    result = exact_match(model, tokenizer, rows, max_new_tokens=4)
    assert [dataclasses.replace(e, predicted="", correct=False) for e in result.examples[1:]].count(
        dataclasses.replace(result.examples[1], predicted="", correct=False)
    ) == 2
    assert result.examples[1].predicted == result.examples[2].predicted
    assert [e.expected.strip() for e in result.examples] == ["19"] * 3


# ── What is asked of the model ───────────────────────────────────────────────────────────────────────────────────────


class Letters:
    """A tokenizer of letters: a is 10, b is 11; 0 pads and 1 ends."""

    pad_token_id: int | None = 0
    eos_token_id: int | None = 1
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 87 for letter in text]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(87 + one) for one in ids if one > 9 or not skip_special_tokens)


class Echo(torch.nn.Module):
    """Repeats the last letter of a prompt, ends, and goes on with noise, as when it stays in step with other ranks."""

    def __init__(self, *, mark: str = "", ends: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        if mark:
            setattr(self.weight, mark, 3)
        self.generation_config = SimpleNamespace(eos_token_id=ends)
        self.asked: list[dict[str, Any]] = []

    def generate(self, **given: Any) -> torch.Tensor:
        self.asked.append({**given, "training": self.training})
        ids = given["input_ids"]
        end, noise = torch.full((len(ids), 1), 1), torch.full((len(ids), 1), 30)
        return torch.cat([ids, ids[:, -1:], end, noise], 1)


LETTERS = [{"prompt": prompt, "answer": answer} for prompt, answer in (("abc", "c"), ("a", "A."), ("ab", "x"))]


def test_batches_are_filled_up_on_the_left_and_sorted_by_length():
    model = Echo()
    result = exact_match(model, Letters(), LETTERS, batch_size=2, max_new_tokens=5)
    assert [one["input_ids"].tolist() for one in model.asked] == [[[0, 10], [10, 11]], [[10, 11, 12]]]
    assert [one["attention_mask"].tolist() for one in model.asked] == [[[0, 1], [1, 1]], [[1, 1, 1]]]
    assert [(e.question, e.expected, e.predicted, e.correct) for e in result.examples] == [
        ("abc", "c", "c", True), ("a", "A.", "a", True), ("ab", "x", "b", False),
    ]  # fmt: skip
    assert (result.num_correct, result.num_questions, result.accuracy) == (2, 3, 2 / 3)
    assert set(result.tasks) == {"all"}
    assert 0 <= result.seconds < 10
    assert not model.asked[0]["training"]
    assert model.training
    assert exact_match(model, Letters(), []).accuracy == 0.0


def test_answers_are_decoded_greedily_whatever_the_model_would_do():
    model = Echo(ends=[7, 1])
    exact_match(model, Letters(), LETTERS)
    (asked,) = model.asked
    plain = GenerationConfig(max_new_tokens=32, do_sample=False, use_cache=True, eos_token_id=[1, 7], pad_token_id=0)
    neutral = {"num_beams": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
    found = asked["generation_config"].to_dict()
    assert {name: found[name] for name in neutral} == neutral
    assert {**found, **dict.fromkeys(neutral)} == {**plain.to_dict(), **dict.fromkeys(neutral)}


@pytest.mark.parametrize(
    ("tokenizer_end", "fills", "model_ends", "ends", "pad"),
    [(1, 0, None, [1], 0), (1, None, 7, [1, 7], 1), (None, None, [9, 7], [7, 9], 7), (1, 5, (1, 3), [1, 3], 5)],
)
def test_an_answer_ends_with_the_tokenizers_and_the_models_tokens(tokenizer_end, fills, model_ends, ends, pad):
    letters, model = Letters(), Echo(ends=model_ends)
    letters.eos_token_id, letters.pad_token_id = tokenizer_end, fills
    exact_match(model, letters, LETTERS)
    config = model.asked[0]["generation_config"]
    assert (config.eos_token_id, config.pad_token_id) == (ends, pad)
    assert model.asked[0]["input_ids"][0, 0] == pad


def test_no_end_token_is_refused():
    letters = Letters()
    letters.eos_token_id = None
    with pytest.raises(ConfigError, match="names an end token"):
        exact_match(Echo(), letters, LETTERS)


@pytest.mark.parametrize(("mark", "world_size", "in_step"), [("", 2, False), ("ds_id", 2, True), ("ds_id", 1, False)])
def test_ranks_keep_in_step_where_weights_are_shared(mark, world_size, in_step):
    model = Echo(mark=mark)
    exact_match(model, Letters(), LETTERS, rank=world_size - 1, world_size=world_size)
    assert {one["synced_gpus"] for one in model.asked} == {in_step}


def test_every_rank_answers_as_many_and_counts_its_own():
    """Three questions on two ranks: the second rank repeats the last question, and counts only one."""
    models = [Echo(), Echo()]
    found = [
        exact_match(model, Letters(), LETTERS, batch_size=1, rank=rank, world_size=2)
        for rank, model in enumerate(models)
    ]
    assert [len(model.asked) for model in models] == [2, 2]
    assert [[e.question for e in one.examples] for one in found] == [["abc", "ab"], ["a"]]
    assert [(one.num_correct, one.num_questions) for one in found] == [(1, 2), (1, 1)]
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is not below"):
            exact_match(Echo(), Letters(), LETTERS, rank=rank, world_size=2)


def test_wrapped_models_examples_and_messages():
    wrapped = torch.nn.Module()
    wrapped.module = Echo()
    result = exact_match(wrapped, Letters(), LETTERS * 5)
    assert len(result.examples) == 12, "a dozen of fifteen is kept for the report"
    assert len(exact_match(wrapped, Letters(), LETTERS, num_examples=1).examples) == 1
    letters = Letters()
    letters.chat_template = "set"
    letters.apply_chat_template = lambda messages, **options: (
        {"input_ids": [10 + len(messages)]}
        if options == {"add_generation_prompt": True, "return_dict": True}
        else None
    )
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns}, {"messages": turns, "answer": "c"}, {"messages": turns[:1], "answer": 4, "task": ""}]
    found = exact_match(wrapped, letters, rows).examples
    assert [(e.question, e.expected, e.predicted, e.correct, e.task) for e in found] == [
        ("hello", "b", "b", True, "all"), ("hello", "c", "b", False, "all"), ("hello", "4", "b", False, "all"),
    ]  # fmt: skip
