"""A record of how an adapter's base was quantised in training, stored beside the adapter for merging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUANTIZATION_FILE = "quantization_config.json"


def record_quantization(folder: str | Path, quantization_config: Any) -> None:
    """Write a record of how an adapter's base was quantised in training, which merging must repeat.

    Args:
        folder: The adapter's folder.
        quantization_config: `BitsAndBytesConfig`, its dictionary, or None (nothing is written).
    """
    if quantization_config is None:
        return
    values = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
    Path(folder).mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=2, sort_keys=True, default=_plain) + "\n"
    (Path(folder) / QUANTIZATION_FILE).write_text(text, encoding="utf-8")


def _plain(value: object) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value).removeprefix("torch.")


def read_quantization(folder: str | Path) -> dict[str, Any] | None:
    """The record written by `record_quantization` in `folder`, or None."""
    path = Path(folder) / QUANTIZATION_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def quantization_of(model: Any) -> dict[str, Any] | None:
    """How the base of `model` was quantised to 4 bits, with its original dtype as ``base_dtype``; None otherwise."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None or not getattr(config, "load_in_4bit", False):
        return None
    states = (
        getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
        for module in model.modules()
        if type(module).__name__ == "Linear4bit"
    )
    dtype = next((state.dtype for state in states if state is not None), None)
    return {**config.to_dict(), **({"base_dtype": _plain(dtype)} if dtype is not None else {})}
