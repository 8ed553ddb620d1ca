"""Number of tokens that each layer's attention looks back, from the fields of a config."""

from __future__ import annotations

from collections.abc import Callable

from accel_scale.planning.models.config_fields import ConfigFields

Windows = Callable[[ConfigFields], tuple["int | None", ...]]


def all_windows(config: ConfigFields) -> tuple[int | None, ...]:
    """Every layer looks back `sliding_window` tokens, if the config sets it."""
    return (config.whole_or_none("sliding_window"),) * config.whole("num_hidden_layers")


def no_windows(config: ConfigFields) -> tuple[int | None, ...]:
    """Every layer looks back at everything."""
    return (None,) * config.whole("num_hidden_layers")


def typed_windows(is_sliding: Callable[[int, ConfigFields], bool]) -> Windows:
    """Windows of the layers that ``layer_types`` calls sliding or, without that field, that `is_sliding` selects."""

    def windows(config: ConfigFields) -> tuple[int | None, ...]:
        count, window, types = (
            config.whole("num_hidden_layers"),
            config.get("sliding_window"),
            config.get("layer_types"),
        )
        if types is not None and (not isinstance(types, list) or len(types) != count):
            raise config.error("layer_types", f"one entry for each of the {count} layers")
        switched_off = "use_sliding_window" in config.defaults and not config.flag("use_sliding_window")
        if not window or switched_off:
            return (None,) * count
        window = config.whole("sliding_window")
        slides = (types[i] == "sliding_attention" if types else is_sliding(i, config) for i in range(count))
        return tuple(window if slide else None for slide in slides)

    return windows


def pattern(length: int) -> Callable[[int, ConfigFields], bool]:
    """All layers but every `length`-th (or ``sliding_window_pattern``-th)."""
    return lambda i, config: bool((i + 1) % (config.get("sliding_window_pattern") or length))


def late_layers(i: int, config: ConfigFields) -> bool:
    """The layers from ``max_window_layers`` on (Qwen 2 and 3)."""
    return i >= int(config.get("max_window_layers"))


def switched_windows(config: ConfigFields) -> tuple[int | None, ...]:
    """A window in every layer, if ``use_sliding_window`` is on."""
    return all_windows(config) if config.flag("use_sliding_window") else no_windows(config)


def has_rope(i: int, config: ConfigFields) -> bool:
    """True if a layer of SmolLM 3 rotates its queries and keys; layers that do not may have a window."""
    layers = config.get("no_rope_layers")
    return bool(layers[i] if layers else (i + 1) % (config.get("no_rope_layer_interval") or 4))
