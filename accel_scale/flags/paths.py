"""The recipes' flags that name models, data and checkpoints, and which of their values are paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODEL_FLAGS = ("model_name_or_path", "model_config", "tokenizer")
DATA_FLAGS = ("dataset_name", "dataset_mixture", "data", "validation_data")
RESUME_FLAGS = ("resume_from_checkpoint", "resume")
_AUTO, _NO = ("auto", "true", "yes", ""), ("no", "false", "none", "never")


def named_inputs(values_of: Callable[[str], list[Any]]) -> dict[str, list[str]]:
    """Flag → the models or data that it names, without mixture weights.

    Args:
        values_of: Returns the values of a flag, none if it was not given.
    """
    named = {flag: [str(value) for value in values_of(flag) if value] for flag in (*MODEL_FLAGS, *DATA_FLAGS)}
    return {flag: [without_weight(value) for value in values] for flag, values in named.items() if values}


def as_list(value: Any) -> list[Any]:
    """The values of a flag that takes one or several, as a list; empty for None."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def without_weight(item: str) -> str:
    """``a.jsonl=0.7`` → ``a.jsonl``."""
    name, equals, weight = item.rpartition("=")
    try:
        float(weight)
    except ValueError:
        return item
    return name if equals and name else item


def resume_choice(value: object) -> str:
    """``auto``, ``no`` (in any spelling) or the path of a checkpoint."""
    text = str(value)
    return "auto" if text.lower() in _AUTO else "no" if text.lower() in _NO else text
