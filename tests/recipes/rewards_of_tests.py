"""A reward that any text earns in part, for TRL's script and ours: the share of even character codes."""

from __future__ import annotations


def even_characters(completions: list[str | list[dict[str, str]]], **unused: object) -> list[float]:
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in texts]
