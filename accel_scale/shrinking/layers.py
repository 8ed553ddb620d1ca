"""Selects the layers that a shrunken model keeps, the first of every kind, and cuts all per-layer fields to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.shrinking.sizes import NUM_LAYERS

MIN_LAYERS = 2
# Values of a configuration, as written to a file.
Stored = Mapping[str, Any]
# Lists with one entry per layer, whose length is the number of layers if no field gives it.
_KINDS = ("layers_block_type", "layer_types")
# Lists of the indices of layers that have some feature.
_INDEX_LISTS = ("moe_layers", "hybrid_layer_ids", "attn_layer_indices")
# Period and offset of the layers that have some feature.
_PERIODS = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))


def num_layers(values: Stored) -> int:
    """Number of layers described by a configuration's values."""
    for key in (*NUM_LAYERS, *_KINDS):
        if values.get(key) is not None:
            return len(values[key]) if key in _KINDS else values[key]
    return first_of(values, NUM_LAYERS)


def chosen_layers(old: Stored, min_layers: int = MIN_LAYERS) -> list[int]:
    """Indices of the layers to keep: the first of every kind (two if they share weights), at least `min_layers`."""
    count = num_layers(old)
    of_kind: dict[tuple[object, ...], list[int]] = {}
    for index in range(count):
        of_kind.setdefault(_layer_kind(old, index), []).append(index)
    chosen = {index for same in of_kind.values() for index in same[: 2 if _shares_weights(old, same[0]) else 1]}
    for index in range(count):
        if len(chosen) >= min(min_layers, count):
            break
        chosen.add(index)
    return sorted(chosen)


def shrink_layers(old: Stored, new: dict[str, Any], min_layers: int) -> None:
    """Cut `new` to the layers kept from `old`."""
    chosen = chosen_layers(old, min_layers)
    set_all(new, NUM_LAYERS, len(chosen))
    for key in _per_layer_keys(old):
        new[key] = [old[key][index] for index in chosen]
    for key in _index_lists(old):
        new[key] = [place for place, index in enumerate(chosen) if index in old[key]]
    if old.get("per_layer_config"):
        kept = {int(index): dict(changes) for index, changes in old["per_layer_config"].items()}
        new["per_layer_config"] = {str(place): kept[i] for place, i in enumerate(chosen) if i in kept}
    for period, offset in _periods(old):
        places = [place for place, index in enumerate(chosen) if _is_due(old, index, period, offset)]
        if places and len(places) < len(chosen):
            new[period], new[offset] = len(chosen), places[0]
    if old.get("decoder_sparse_step") is not None:
        new["decoder_sparse_step"] = 1
        new["mlp_only_layers"] = [place for place, index in enumerate(chosen) if _is_dense(old, index)]
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if old.get(key) is not None:
            new[key] = sum(index < old[key] for index in chosen)
    if old.get("num_kv_shared_layers"):
        new["num_kv_shared_layers"] = sum(_shares_keys(old, index) for index in chosen)
    if old.get("max_window_layers") is not None:
        new["max_window_layers"] = min(old["max_window_layers"], len(chosen))
    if old.get("attention_types"):  # GPT-Neo abbreviates its list of kinds
        new["attention_types"] = [[[kind], 1] for kind in new["attention_layers"]]


def _layer_kind(old: Stored, index: int) -> tuple[object, ...]:
    """What distinguishes layer `index` from others: its entry in every list, and whether it has experts."""
    per_layer = tuple(str(old[key][index]) for key in _per_layer_keys(old))
    listed = tuple(index in old[key] for key in _index_lists(old))
    due = tuple(_is_due(old, index, *names) for names in _periods(old))
    own = str({int(key): value for key, value in (old.get("per_layer_config") or {}).items()}.get(index))
    return (*per_layer, *listed, *due, own, _is_dense(old, index), _shares_keys(old, index))


def _per_layer_keys(old: Stored) -> list[str]:
    count, others = num_layers(old), _INDEX_LISTS
    lists = [key for key, value in old.items() if isinstance(value, list) and len(value) == count > 1]
    return [key for key in lists if key not in others and key != "attention_types"]


def _index_lists(old: Stored) -> list[str]:
    return [key for key in _INDEX_LISTS if isinstance(old.get(key), list)]


def _periods(old: Stored) -> list[tuple[str, str]]:
    listed = any(old.get(key) for key in _KINDS)  # layers with attention are listed one by one
    periods = [names for names in _PERIODS if old.get(names[0]) and old.get(names[1]) is not None]
    return [names for names in periods if not (listed and names[0] == "attn_layer_period")]


def _is_due(old: Stored, index: int, period: str, offset: str) -> bool:
    return bool(index % old[period] == old[offset])


def _is_dense(old: Stored, index: int) -> bool:
    """True if a mixture-of-experts model has a dense feed-forward at `index` (Qwen's and DeepSeek's conventions)."""
    step = old.get("decoder_sparse_step") or 1
    listed = index in (old.get("mlp_only_layers") or ())
    first = max(old.get("first_k_dense_replace") or 0, old.get("num_dense_layers") or 0)
    return listed or (index + 1) % step != 0 or index < first


def _shares_keys(old: Stored, index: int) -> bool:
    """True if layer `index` takes its keys and values from an earlier one, as the last layers of Gemma 3n do."""
    return index >= num_layers(old) - (old.get("num_kv_shared_layers") or 0)


def _shares_weights(old: Stored, index: int) -> bool:
    """True if the layers of this kind share one block of weights, as Zamba's do; transformers ties two or more."""
    return (old.get("layers_block_type") or [])[index : index + 1] == ["hybrid"]


def first_of(values: Stored, names: Iterable[str], *, default: int | None = None) -> int:
    """The value of the first of `names` that is set."""
    for name in names:
        if values.get(name) is not None:
            return values[name]
    if default is None:
        raise ConfigError(
            f"the configuration has none of {', '.join(names)}.",
            place=str(values.get("model_type")),
            fix="rehearse with a model of a family that transformers knows as a causal language model.",
        )
    return default


def set_all(values: dict[str, Any], names: Iterable[str], value: int) -> None:
    """Write `value` to every one of `names` that is set, so that aliases stay equal."""
    for name in names:
        if values.get(name) is not None:
            values[name] = value
