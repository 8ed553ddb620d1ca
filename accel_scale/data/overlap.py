"""Whether held-out rows were seen in training: exact matches after case and white space are taken out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Overlap:
    """Held-out questions that are also in the training rows; `examples` are some of them, at most ten."""

    num_heldout: int
    num_shared: int
    examples: tuple[str, ...]

    @property
    def share(self) -> float:
        """Shared questions ÷ held-out questions."""
        return self.num_shared / self.num_heldout if self.num_heldout else 0.0


def overlap(train: Iterable[Mapping[str, Any]], heldout: Iterable[Mapping[str, Any]]) -> Overlap:
    """Compare the questions (not the replies) of two data sets in TRL's formats.

    A question is everything before the first reply: the user's and system's turns, the prompt, or the whole text.
    Memory: 16 bytes a training row.
    """
    seen = {_key(question(row)) for row in train}
    num_heldout, num_shared = 0, 0
    examples: list[str] = []
    for row in heldout:
        asked = question(row)
        num_heldout += 1
        if _key(asked) in seen:
            num_shared += 1
            if len(examples) < 10:
                examples.append(asked)
    return Overlap(num_heldout, num_shared, tuple(examples))


def question(row: Mapping[str, Any]) -> str:
    """What a row asks, as text."""
    for column in ("messages", "prompt"):
        if isinstance(row.get(column), list):
            asked = []
            for turn in row[column]:
                if turn["role"] == "assistant":
                    break
                asked.append(turn["content"] or "")
            return "\n".join(asked)
    return row["prompt"] if "prompt" in row else row["text"]


def _key(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=16).digest()
