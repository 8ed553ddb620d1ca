"""Conversations in data sets: lists of turns, and the keys of a turn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# Keys of a turn beyond role and content that chat templates read.
RICH_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
TURN_KEYS = (("role", "content"), ("from", "value"))


def as_turns(value: object) -> list[Any] | None:
    """`value` if it is a list of turns, also written as a JSON string; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None


def turn_keys_of(rows: Sequence[Mapping[str, Any]], column: str) -> tuple[str, str] | None:
    """The keys of the turns in `column`: those of most sampled rows, so that bad ones do not decide."""
    votes: Counter[tuple[str, str] | None] = Counter()
    for row in rows:
        value = row.get(column)
        turns = as_turns(value)
        if turns and isinstance(turns[0], Mapping):
            votes.update([keys for keys in TURN_KEYS if keys[0] in turns[0] or keys[1] in turns[0]][:1])
        elif isinstance(value, str):
            votes[None] += 1
    return votes.most_common(1)[0][0] if votes else None


def is_rich(value: object) -> bool:
    """True if a turn carries more than role and content."""
    turns = as_turns(value) or []
    return any(isinstance(turn, Mapping) and any(turn.get(key) for key in RICH_KEYS) for turn in turns)
