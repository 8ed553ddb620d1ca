"""The recipes' flags that name models, data and checkpoints: which of their values are paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODEL_FLAGS = ("model_name_or_path", "model_config", "tokenizer")
DATA_FLAGS = ("dataset_name", "dataset_mixture", "data", "validation_data")
RESUME_FLAGS = ("resume_from_checkpoint", "resume")
_AUTO, _NO = ("auto", "true", "yes", ""), ("no", "false", "none", "never")


def named_inputs(values_of: Callable[[str], list[Any]]) -> dict[str, list[str]]:
    """Flag → the models or data that it names, without the weights of a mixture.

    Args:
        values_of: The values of a flag, none where it was not given.
    """
    named = {flag: [str(value) for value in values_of(flag) if value] for flag in (*MODEL_FLAGS, *DATA_FLAGS)}
    return {flag: [without_weight(value) for value in values] for flag, values in named.items() if values}


def as_list(value: Any) -> list[Any]:
    """The values of a flag that takes one or several; none for None."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def without_weight(item: str) -> str:
    """``a.jsonl`` of ``a.jsonl=0.7``."""
    name, equals, weight = item.rpartition("=")
    try:
        float(weight)
    except ValueError:
        return item
    return name if equals and name else item


def resume_choice(value: object) -> str:
    """``auto``, ``no``, or the path of a checkpoint, however it was written."""
    text = str(value)
    return "auto" if text.lower() in _AUTO else "no" if text.lower() in _NO else text
