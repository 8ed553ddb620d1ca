"""Tokenizers for pretraining: any text is restored, files load again, text is never taken for special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from accel_scale.data.default import default_model_path
from accel_scale.data.pretraining import load_pretraining_tokenizer, sample_texts, train_tokenizer
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.errors import ConfigError

TEXTS = ["Once upon a time, there was a little girl.\n", "Ein Mädchen  lief\tüber 12 Brücken! " * 50, "日本語 🙂"]
BYTE = load_pretraining_tokenizer("byte")
CHAR = load_pretraining_tokenizer("char", texts=iter(TEXTS))
TRAINED = train_tokenizer(iter(TEXTS), 300)


@settings(deadline=None, max_examples=80)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_any_text_comes_back_from_bytes_and_trained_tokenizers(text: str) -> None:
    for tokenizer in (BYTE, TRAINED):
        encoder = Encoder(tokenizer)
        (tokens,) = encoder.encode([text], closed=[False])
        assert encoder.decode(tokens) == text
    assert Encoder(BYTE).encode([text])[0].tolist() == [*text.encode(), 256]


def test_characters_are_those_of_the_data() -> None:
    encoder = Encoder(CHAR)
    for text in TEXTS:
        (tokens,) = encoder.encode([text])
        assert len(tokens) == len(text) + 1
        assert encoder.decode(tokens[:-1]) == text
    assert len(CHAR) == len(set("".join(TEXTS))) + 3
    assert CHAR.decode(encoder.encode(["Zq"])[0]) == "<|unk|><|unk|><|endoftext|>"


@pytest.mark.parametrize("name", ["byte", "char", "trained", "embedded"])
def test_they_are_real_tokenizers_that_save_and_load(tmp_path: Path, name: str) -> None:
    tokenizer = {"byte": BYTE, "char": CHAR, "trained": TRAINED}.get(name) or load_pretraining_tokenizer(
        default_model_path()
    )
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    again = load_pretraining_tokenizer(str(tmp_path))
    for other in (loaded, again):
        assert other(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
        assert other.decode(other(TEXTS[1])["input_ids"]) == TEXTS[1]
        assert (other.eos_token_id, other.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert Encoder(other).fingerprint() == Encoder(tokenizer).fingerprint()


def test_fingerprints_tell_tokenizers_apart_and_ignore_what_does_not_matter() -> None:
    prints = [Encoder(tokenizer).fingerprint() for tokenizer in (BYTE, CHAR, TRAINED, train_tokenizer(TEXTS, 290))]
    assert len(set(prints)) == 4
    copy = load_pretraining_tokenizer("byte")
    copy(["a", "bc"], padding=True, truncation=True, max_length=1)
    copy.model_max_length = 7
    assert Encoder(copy).fingerprint() == prints[0]


def test_text_is_never_taken_for_special_tokens() -> None:
    (tokens,) = Encoder(TRAINED).encode(["a<|endoftext|>b"])
    assert tokens.tolist().count(TRAINED.eos_token_id) == 1
    assert TRAINED("a<|endoftext|>b")["input_ids"].count(TRAINED.eos_token_id) == 1  # the user's copy is unchanged


def test_documents_are_opened_where_the_tokenizer_would() -> None:
    tokenizer = load_pretraining_tokenizer("byte")
    assert Encoder(tokenizer).prefix == []
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    assert Encoder(tokenizer).prefix == []  # the tokenizer has the token but does not add it
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", bos)]
    )
    encoder = Encoder(tokenizer)
    assert encoder.encode(["ab"])[0].tolist() == [bos, 97, 98, 256]
    assert encoder.encode(["ab"], [False], [False])[0].tolist() == [97, 98]


def test_training_reads_a_bounded_sample_of_the_data(write_jsonl) -> None:
    path = write_jsonl("rows.jsonl", [{"text": f"number {index} " * 20} for index in range(5000)])
    sample = list(sample_texts(path, max_bytes=400_000))
    assert 400_000 <= sum(map(len, sample)) < 500_000
    numbers = [int(text.split()[1]) for text in sample]
    assert max(numbers) - min(numbers) > 3000  # from all parts of the file
    assert len(list(sample_texts(path))) == 5000
    assert len(train_tokenizer(sample_texts(path, max_bytes=400_000), 300)) == 300
    other = write_jsonl("others.jsonl", [{"text": f"other {index} " * 20} for index in range(5000)])
    mixed = list(sample_texts([f"{path}=0.75", f"{other}=0.25"], max_bytes=400_000))
    of_other = sum(len(text) for text in mixed if text.startswith("other"))
    assert 300_000 <= sum(map(len, mixed)) - of_other < 400_000
    assert 100_000 <= of_other < 200_000


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: load_pretraining_tokenizer("/does/not/exist"), "cannot be loaded"),
        (lambda: load_pretraining_tokenizer("char"), "needs texts"),
        (lambda: load_pretraining_tokenizer("char", texts=[""]), "no characters"),
        (lambda: load_pretraining_tokenizer("byte", texts=TEXTS), "not made from texts"),
        (lambda: train_tokenizer(TEXTS, 100), "no room for the 256 bytes"),
    ],
)
def test_what_is_refused(call, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call()
