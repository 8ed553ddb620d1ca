"""Check which models Ulysses can divide."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.modeling.model_class import numbers_of_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Layers that read other positions only through attention, whose functions and masks see whole rows.
_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_ATTENTIONS = ("sdpa_packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
_PLACE = "--sp_size"


def check_sequence_parallel(
    config: PreTrainedConfig, sp_size: int, row_length: int, attention: str, *, tp_size: int = 1
) -> None:
    """Refuse models and rows that Ulysses cannot divide among `sp_size` ranks.

    Sliding windows, packed documents and all of the model's own masks work with each of the attentions accepted here:
    inside attention a rank has all positions, and masks are built there, for whole rows.

    Args:
        config: The model's `PreTrainedConfig`.
        sp_size: Ranks that share each row; 1 is always accepted.
        row_length: Tokens per row.
        attention: Resolved attention implementation, by its name in transformers.
        tp_size: Tensor-parallel ranks, which have already divided the heads.

    Raises:
        ConfigError: for heads or rows that do not divide, attention without a place for the exchange, and models whose
            layers mix positions elsewhere.
    """
    if sp_size == 1:
        return
    text_config = config.get_text_config()
    _check_architecture(text_config, attention)
    if attention not in _ATTENTIONS and "flash" not in attention:
        raise ConfigError(
            f"{attention} attention does not run with sequence parallelism.",
            place="--attn_implementation",
            fix=f"use {', '.join(_ATTENTIONS)}.",
        )
    _check_heads(text_config, sp_size, tp_size)
    if row_length % sp_size:
        raise ConfigError(
            f"rows of {row_length} tokens cannot be cut into {sp_size} equal parts.",
            place=_PLACE,
            fix=f"use --max_length {-(-row_length // sp_size) * sp_size}.",
        )


def _check_heads(config: PreTrainedConfig, sp_size: int, tp_size: int) -> None:
    """Check that all ranks get the same number of query heads per layer, and whole key heads, their own or shared."""
    all_heads = numbers_of_layers(config, "num_attention_heads")
    all_keys = numbers_of_layers(config, "num_key_value_heads") or all_heads
    layers = zip(all_heads, all_keys, strict=True) if len(all_heads) == len(all_keys) else product(all_heads, all_keys)
    for heads, keys in sorted(set(layers)):
        _check_layer(heads, keys, sp_size, tp_size)


def _check_layer(heads: int, keys: int, sp_size: int, tp_size: int) -> None:
    local_heads, local_keys = heads // tp_size, max(1, keys // tp_size)
    shared = f" on each of {tp_size} tensor-parallel ranks" if tp_size > 1 else ""
    if heads % tp_size or local_heads % sp_size:
        raise ConfigError(
            f"{local_heads} attention heads{shared} cannot be divided among {sp_size} sequence-parallel ranks.",
            place=_PLACE,
            fix=f"use {_divisors(local_heads)}.",
        )
    if local_keys % sp_size and sp_size % local_keys:
        sizes = [
            n for n in range(2, local_heads + 1) if not local_heads % n and not (local_keys % n and n % local_keys)
        ]
        raise ConfigError(
            f"{local_keys} key heads{shared} neither divide nor are divided by {sp_size} sequence-parallel ranks.",
            place=_PLACE,
            fix=f"use {', '.join(map(str, sizes)) or '1'}.",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(2, number + 1) if number % n == 0) or "1"


def _check_architecture(config: PreTrainedConfig, attention: str) -> None:
    """Check that only attention mixes positions, and only through transformers' interface, for the exchange."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "index_topk", None):
        raise ConfigError(
            f"{kind} attention picks its keys by an index over the row, of which a part knows too little.",
            place=_PLACE,
            fix="use 1 for this model.",
        )
    mixing = layer_types - _ATTENTION_LAYER_TYPES
    if mixing or getattr(model_class, "_is_stateful", False):
        layers = f" ({', '.join(sorted(mixing))} layers)" if mixing else ""
        raise ConfigError(
            f"{kind} models{layers} carry a state or a convolution along the sequence, across its parts.",
            place=_PLACE,
            fix="use 1 for this model.",
        )
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise ConfigError(
            f"{model_class.__name__} does not use transformers' attention interface, where heads are exchanged.",
            place=_PLACE,
            fix="use 1 for this model.",
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f"{kind} attention is not causal.", place=_PLACE, fix="use 1 for this model.")
    if "chunked_attention" in layer_types and "flash" in attention:
        raise ConfigError(
            f"{attention} has no chunked attention, which {kind} models use.",
            place="--attn_implementation",
            fix="use sdpa.",
        )
