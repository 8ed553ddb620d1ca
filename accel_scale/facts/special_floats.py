"""Infinity and NaN in a model's config.json, which transformers writes as ``{"__float__": "Infinity"}``."""

from __future__ import annotations

import json

_VALUES = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def read_config_json(text: str) -> object:
    """The content of a config.json.

    Raises:
        ValueError: if it is not JSON.
    """
    return json.loads(text, object_hook=_special)


def _special(found: dict[str, object]) -> object:
    tag = found.get("__float__") if len(found) == 1 else None
    return _VALUES.get(tag, found) if isinstance(tag, str) else found
