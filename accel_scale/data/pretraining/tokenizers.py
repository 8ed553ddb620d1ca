"""Tokenizers to pretrain with: from the hub or a folder, of bytes, of the data's characters, or trained on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError, first_sentence

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

DOCUMENT_END, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<|unk|>"
_SMALLEST_VOCABULARY = 256 + 2
# Longer texts are cut to train a vocabulary: that counts words, whose context does not matter.
_LONGEST_TEXT = 1 << 20


def load_pretraining_tokenizer(name: str, *, texts: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with an end-of-document token.

    Args:
        name: A folder or hub id, or ``byte`` (the 256 bytes, ids equal to their values: any text, nothing to train),
            or ``char`` (the characters of `texts`; others become ``<|unk|>``).
        texts: For ``char`` only; all of them are read, see `sample_texts`.

    Raises:
        ConfigError: no such tokenizer, ``char`` without texts, or texts for another name.
    """
    if name == "char":
        if texts is None:
            raise ConfigError("a tokenizer of characters needs texts.", place="--tokenizer", fix="give the data.")
        return _char_tokenizer(texts)
    if texts is not None:
        raise ConfigError(f"the tokenizer {name!r} is not made from texts.", place="texts", fix="leave them out.")
    if name == "byte":
        return _byte_tokenizer()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(name))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} cannot be loaded ({first_sentence(error)}).",
            place="--tokenizer",
            fix="name a folder with a tokenizer, a hub id, `byte` or `char`.",
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"{name!r} has no fast tokenizer ({type(tokenizer).__name__}).",
            place="--tokenizer",
            fix="name one with a tokenizer.json.",
        )
    return tokenizer


def _wrapped(tokenizer: Tokenizer, *, unknown: str | None = None) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=DOCUMENT_END,
        pad_token=PAD,
        unk_token=unknown,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    vocab |= {DOCUMENT_END: 256, PAD: 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _char_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise ConfigError("the texts have no characters.", place="--tokenizer", fix="check the data.")
    vocab = {character: index for index, character in enumerate(sorted(characters))}
    for special in (DOCUMENT_END, PAD, UNKNOWN):
        vocab[special] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    # Words are short, so that the model's cache of words works; tokens are characters either way.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s?\S{1,24}|\s"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, unknown=UNKNOWN)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (GPT-2's kind) that encodes any text and decodes it back exactly.

    Args:
        texts: Read once, as a stream; memory grows with the number of different words. See `sample_texts`.
        vocab_size: Tokens wanted, special ones included; texts with little variety may give fewer.

    Raises:
        ConfigError: a vocabulary smaller than the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"a vocabulary of {vocab_size} has no room for the 256 bytes and 2 special tokens.",
            place="vocab_size",
            fix=f"give {_SMALLEST_VOCABULARY} or more, or use the tokenizer `byte`.",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DOCUMENT_END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (text[start : start + _LONGEST_TEXT] for text in texts for start in range(0, len(text), _LONGEST_TEXT))
    tokenizer.train_from_iterator(pieces, trainer)
    return _wrapped(tokenizer)
