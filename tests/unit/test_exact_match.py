"""Exact match on the embedded base model: batching, sharing between ranks, counting, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_scale.data.default import default_dataset, default_model_path
from accel_scale.errors import ConfigError
from accel_scale.training.evaluation.exact_match import exact_match, normalize_answer


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
    """Prompts the base model completes and then ends by itself: plain statements of solved problems, cut short."""
    texts = ["12 + 7 =", "The reverse of QXKD is", "In m, 12.50 km are", "The largest of 12, 93, 55, 31 is", "KLMN ="]
    texts += [f"{a} plus {a + 3} is" for a in range(10, 25)]
    return [{"prompt": text, "answer": "unknown", "task": "a" if i % 2 else "b"} for i, text in enumerate(texts)]


def test_base_model_hardly_answers(model, tokenizer, questions):
    result = exact_match(model, tokenizer, questions, batch_size=100, max_new_tokens=24)
    assert result.num_questions == 200
    assert result.accuracy <= 0.10  # a third of the unit conversions
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
