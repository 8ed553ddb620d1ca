"""Tokenise whole documents for pretraining, with begin and end tokens, nothing cut or interpreted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Parts of a fast tokenizer's file that do not affect how text becomes tokens.
_NOT_ENCODING = ("version", "truncation", "padding", "post_processor", "decoder")


class Encoder:
    """Turns texts into token arrays with its own copy of a tokenizer, whose settings nothing else changes.

    A document is opened by the tokenizer's BOS token if the tokenizer itself would put one there, and closed by its
    EOS token if it has one. Text is text: ``<|endoftext|>`` written in a document is not treated as the token.

    Args:
        tokenizer: Any transformers tokenizer; fast ones are used directly.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.prefix = self._opening(tokenizer)
        self.suffix = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        pad = tokenizer.pad_token_id
        self.pad_id = int(pad) if pad is not None else (self.suffix[0] if self.suffix else 0)
        self._backend: Any = None
        self._fingerprint: str | None = None

    @staticmethod
    def _opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
        bos = tokenizer.bos_token_id
        if bos is None:
            return []
        ids = tokenizer("a", add_special_tokens=True)["input_ids"]
        return [int(bos)] if ids and ids[0] == bos else []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None}  # its settings do not survive pickling

    def _fast(self) -> Any:
        if self._backend is None:
            from tokenizers import Tokenizer

            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            if not isinstance(backend, Tokenizer):
                return None
            self._backend = Tokenizer.from_str(backend.to_str())
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = True
        return self._backend

    def encode(
        self, texts: Sequence[str], opened: Sequence[bool] | None = None, closed: Sequence[bool] | None = None
    ) -> list[np.ndarray]:
        """One int32 array per text.

        Args:
            opened, closed: Whether each text begins and ends a document; None: all do.
        """
        backend = self._fast()
        if backend is None:
            ids = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        else:
            ids = [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        arrays = []
        for index, tokens in enumerate(ids):
            prefix = self.prefix if opened is None or opened[index] else []
            suffix = self.suffix if closed is None or closed[index] else []
            arrays.append(np.array([*prefix, *tokens, *suffix] if prefix or suffix else tokens, dtype=np.int32))
        return arrays

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(map(int, tokens)), clean_up_tokenization_spaces=False))

    def fingerprint(self) -> str:
        """A hash of everything that determines the tokens of a text; the same after saving and loading."""
        if self._fingerprint is None:
            self._fingerprint = self._described()
        return self._fingerprint

    def _described(self) -> str:
        described: dict[str, Any] = {"prefix": self.prefix, "suffix": self.suffix}
        backend = self._fast()
        if backend is None:
            described |= {"class": type(self.tokenizer).__name__, "vocab": sorted(self.tokenizer.get_vocab().items())}
        else:
            told = json.loads(backend.to_str())
            described |= {name: value for name, value in told.items() if name not in _NOT_ENCODING}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


@contextlib.contextmanager
def one_thread_tokenizers(applies: bool = True) -> Iterator[None]:
    """Make workers started in this context tokenise on one thread each: there are as many workers as cores."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    if applies and before is None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if applies and before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
