"""Check a model's folder before its weights are read: complete files, matching shapes and tokens, row lengths."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accel_scale.errors import ConfigError, first_line
from accel_scale.modeling.stored_weights import stored_shapes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Files of a model's image processor; either of the first two indicates that there is one.
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
)  # fmt: skip
_OWN_CONFIG = "take the config.json that these weights were saved with."


def check_model_files(
    name: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, place: str = "--model_name_or_path"
) -> None:
    """Refuse a model that cannot be loaded or trained, judged by its headers alone.

    Args:
        name: A folder; models on the hub are not checked.
        place: Where the model was named.

    Raises:
        ConfigError: for truncated or missing weights, a configuration that does not match them, or a tokenizer with
            more tokens than the embedding has rows.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        shapes = stored_shapes(folder)
        if shapes and not getattr(config, "quantization_config", None) and not getattr(config, "auto_map", None):
            _check_shapes(config, shapes, folder)
    check_tokenizer(config, tokenizer, place=place)


def _check_shapes(config: PretrainedConfig, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Refuse a configuration whose model has other shapes than the weights beside it."""
    model = _skeleton(config, str(folder / "config.json"))
    if model is None:
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for stored, made in _same_names(model.base_model_prefix, shapes, wanted):
        if shapes[stored] != wanted[made]:
            refuse_shape(stored, shapes[stored], wanted[made], folder)


def refuse_shape(name: str, stored: tuple[int, ...], made: tuple[int, ...], folder: Path) -> NoReturn:
    """Refuse a configuration that makes a tensor of another shape than the weights beside it have."""
    raise ConfigError(
        f"{name} is {_text(stored)} in the weights, but this configuration makes it {_text(made)}.",
        place=str(folder / "config.json"),
        fix=_OWN_CONFIG,
    )


def _skeleton(config: PretrainedConfig, place: str) -> PreTrainedModel | None:
    from accel_scale.modeling.loading import skeleton_of

    try:
        return skeleton_of(config)  # type: ignore[no-any-return]
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            return None  # no causal language model by its class; loading reports more
        raise ConfigError(f"no model can be made of it: {first_line(error)}.", place=place, fix=_OWN_CONFIG) from None
    except (RuntimeError, TypeError, ZeroDivisionError, AssertionError, IndexError, KeyError) as error:
        raise ConfigError(f"no model can be made of it: {first_line(error)}.", place=place, fix=_OWN_CONFIG) from None


def _same_names(prefix: str, stored: Iterable[str], wanted: Collection[str]) -> Iterator[tuple[str, str]]:
    """(name in the file, name in the model) of tensors with equal names, up to the base model's prefix."""
    for name in stored:
        made = next((n for n in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if n in wanted), None)
        if made is not None:
            yield name, made


def _text(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a number"


def check_tokenizer(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, place: str) -> None:
    """Refuse a tokenizer with tokens of texts, or special tokens in use, that have no row in the embedding.

    Added tokens that no text produces may lie beyond it: Gemma 3's text models have one for images.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if rows is None or len(tokenizer) <= rows:
        return
    added = set(tokenizer.get_added_vocab().values())
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    largest = max([token for token in tokenizer.get_vocab().values() if token not in added] + list(used))
    if largest >= rows:
        refuse_missing_rows(largest, rows, place=place)


def refuse_missing_rows(largest: int, rows: int, *, place: str) -> NoReturn:
    """Refuse a tokenizer whose `largest` token has no row in the embedding."""
    raise ConfigError(
        f"the tokenizer has tokens up to {largest:,}, and the model an embedding of {rows:,} rows.",
        place=place,
        fix="use the tokenizer that belongs to the model, or give the embedding more rows "
        "(model.resize_token_embeddings) and save both.",
    )


def longest_rows(config: PretrainedConfig) -> int | None:
    """Number of positions of the model, including stretching by its configuration; None if it is unlimited."""
    text: Any = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None or getattr(text, "alibi", False):
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    return max(int(positions), int((rope.get("original_max_position_embeddings") or 0) * factor))


def check_row_length(config: PretrainedConfig, max_length: int | None, *, place: str = "--max_length") -> None:
    """Refuse rows longer than the model's positions: learned ones end there, rotary ones are untrained beyond.

    Raises:
        ConfigError: naming the longest length that fits.
    """
    _check_longest(longest_rows(config), max_length, place)


def check_stored_row_length(folder: Path, max_length: int, *, place: str) -> None:
    """Same as `check_row_length`, from the folder's config.json without libraries; skips stretched positions.

    Raises:
        ConfigError: naming the longest length that fits.
    """
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = stored.get("text_config") or stored
        positions = text.get("max_position_embeddings") or text.get("n_positions")
    except (OSError, ValueError, AttributeError):
        return  # loading it reports the error
    stretched = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if isinstance(positions, int) and not text.get("alibi") and set(stretched) <= {"rope_theta", "rope_type"}:
        _check_longest(positions, max_length, place)


def _check_longest(longest: int | None, max_length: int | None, place: str) -> None:
    if longest is not None and max_length is not None and max_length > longest:
        raise ConfigError(
            f"rows of {max_length:,} tokens are longer than the model's {longest:,} positions.",
            place=place,
            fix=f"use {longest} or less; rotary positions can be stretched with rope_parameters in its config.json.",
        )
