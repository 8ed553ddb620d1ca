"""Length statistics, checked against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_scale.data.lengths import length_distribution, packed_fill
from accel_scale.errors import ConfigError


def test_statistics_of_known_lengths() -> None:
    got = length_distribution([10, 20, 30, 40, 100], max_length=50, batch_size=5)
    assert (got.num_sampled, got.mean_tokens, got.max_tokens) == (5, 40.0, 100)
    assert (got.percentile(50), got.percentile(95)) == (30, 100)
    assert got.truncated_share == pytest.approx(1 / 5)
    assert got.lost_token_share == pytest.approx(50 / 200)
    # One batch of five, padded to 50: 150 tokens in 250 positions.
    assert got.padded_waste == pytest.approx(1 - 150 / 250)
    # Bins of 50: [50] [40, 10] [30, 20].
    assert got.packed_fill == pytest.approx(1.0)
    sorted_batches = length_distribution([10, 10, 50, 50], max_length=50, batch_size=2)
    assert sorted_batches.sorted_waste == 0
    assert length_distribution([7] * 9, max_length=50, batch_size=4).padded_waste == 0


def test_percentiles_samples_and_bins_by_hand() -> None:
    got = length_distribution(range(101), max_length=1000, batch_size=4)
    assert [got.percentile(percent) for percent in (5, 25, 50, 75, 90, 95, 99)] == [5, 25, 50, 75, 90, 95, 99]
    assert (got.truncated_share, got.lost_token_share) == (0, 0)
    assert length_distribution([8, 8, 9], max_length=8, batch_size=1).truncated_share == pytest.approx(1 / 3)
    assert length_distribution([1, 9, 1, 9], max_length=10, batch_size=2).sorted_waste == 0
    # 9 and 6 leave 1 and 4: the 4 goes where it fits best, the 1 fills the first bin, and the 2 opens another.
    assert packed_fill([9, 6, 4, 1], 10) == 1.0
    assert packed_fill([9, 6, 4, 1, 2], 10) == pytest.approx(22 / 30)
    assert packed_fill([], 10) == 0
    many = length_distribution([5] * 10 + [7] * 10, max_length=9, batch_size=2, num_sampled=20)
    assert (many.num_sampled, many.mean_tokens) == (20, 6)
    assert length_distribution(range(100), max_length=9, batch_size=2, num_sampled=99).num_sampled == 99


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(1, 8))
def test_shares_are_shares(lengths: list[int], batch_size: int) -> None:
    got = length_distribution(lengths, max_length=64, batch_size=batch_size)
    assert 0 <= got.sorted_waste < 1
    assert 0 <= got.padded_waste < 1
    assert sum(lengths) / 64 / len(lengths) <= got.packed_fill + 1e-9 <= 1 + 1e-9
    assert packed_fill(lengths, 64) == packed_fill(lengths[::-1], 64)


@pytest.mark.slow
def test_packing_as_trl_packs() -> None:
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    lengths = [3, 9, 14, 2, 7, 16, 5, 5, 11, 1, 8]
    rows = Dataset.from_dict({"input_ids": [list(range(length)) for length in lengths]})
    packed = pack_dataset(rows, 16, "bfd")
    assert packed_fill(lengths, 16) == pytest.approx(sum(lengths) / (len(packed) * 16))


def test_a_prompt_counts_with_its_completion() -> None:
    from datasets import Dataset

    class Letters:
        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    pairs = Dataset.from_dict({"prompt": ["ab", "abc"], "completion": ["cdef", "d"]})
    got = length_distribution(pairs, tokenizer=Letters(), max_length=64, batch_size=1, num_sampled=2)
    assert (got.max_tokens, got.mean_tokens) == (7, 6.0)  # plus the token that ends a row
    with pytest.raises(ConfigError, match="not tokenised"):
        length_distribution(pairs, max_length=64, batch_size=1, num_sampled=2)


def test_rows_and_samples(shared_data) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    from accel_scale.data.loading import load_training_data

    rows = Dataset.from_dict({"input_ids": [[1] * (i % 50 + 1) for i in range(5000)]})
    got = length_distribution(rows, max_length=64, batch_size=8, num_sampled=500)
    assert got.num_sampled == 500
    assert 23 < got.mean_tokens < 28
    assert got == length_distribution(rows, max_length=64, batch_size=8, num_sampled=500)
    streamed = length_distribution(rows.to_iterable_dataset(), max_length=64, batch_size=8, num_sampled=100)
    assert (streamed.num_sampled, streamed.max_tokens) == (100, 50)
    with pytest.raises(ConfigError, match="not tokenised"):
        length_distribution(Dataset.from_dict({"text": ["a"]}), max_length=8, batch_size=1)
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260k")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    questions = load_training_data(str(shared_data / "gsm8k"), columns=["prompt=question", "completion=answer"]).train
    got = length_distribution(questions, tokenizer, max_length=512, batch_size=8, num_sampled=50)
    assert 100 < got.mean_tokens < 600
    messages = Dataset.from_list([{"messages": [{"role": "user", "content": "hi"}]}])
    # The template writes the text and EOS, but no BOS.
    expected = len(tokenizer("hi", add_special_tokens=False)["input_ids"]) + 1
    assert length_distribution(messages, tokenizer, max_length=512, batch_size=8).max_tokens == expected


class Letters:
    """One token per letter, and a leading token unless special tokens are off; its template puts turns in brackets."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, turns: list[dict], *, tokenize: bool, add_generation_prompt: bool = False) -> str:
        assert not tokenize
        return "".join(f"<{turn['content']}>" for turn in turns) + "?" * add_generation_prompt


def said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"text": "abc"}, 1 + 3 + 1),
        ({"prompt": "ab", "completion": "cde"}, 1 + 5 + 1),
        ({"messages": said("user", "ab") + said("assistant", "c")}, 4 + 3),
        ({"prompt": said("user", "ab"), "completion": said("assistant", "c")}, 4 + 3),
        ({"prompt": said("user", "ab"), "answer": "long"}, 4 + 1),
        ({"prompt": "ab", "answer": "long"}, 1 + 2),
        ({"prompt": "ab", "chosen": "c", "rejected": "defgh"}, 1 + 7 + 1),
        ({"chosen": "defgh", "rejected": "c"}, 1 + 5 + 1),
        ({"chosen": said("assistant", "cd"), "rejected": said("assistant", "c")}, 4),
        ({"prompt": said("user", "a"), "chosen": said("assistant", "c"), "rejected": said("assistant", "cd")}, 3 + 4),
    ],
)
def test_what_each_format_takes(row: dict, tokens: int) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([row])
    assert length_distribution(rows, Letters(), max_length=64, batch_size=1).max_tokens == tokens
