"""Refuse `ScalePlugin` settings that would have no effect in any script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accel_scale.errors import ConfigError

# Field → the field without which it has no effect.
_NEEDS = {
    "optim_args": "optimizer",
    "warmup_ratio": "lr_schedule",
    "min_lr_ratio": "lr_schedule",
    "decay_ratio": "lr_schedule",
    "decay_shape": "lr_schedule",
    "num_training_steps": "lr_schedule",
    "lr_base_batch_size": "scale_lr_from_batch_size",
    "fp8_emulate": "precision",
    "guard_threshold": "guard",
    "guard_max_skips": "guard",
}
# Field → another field and the only value of that field with which it has an effect.
_NEEDS_VALUE = {
    "decay_ratio": ("lr_schedule", "warmup_stable_decay"),
    "decay_shape": ("lr_schedule", "warmup_stable_decay"),
    "fp8_emulate": ("precision", "fp8"),
}
_OF_GUARD = ("guard_threshold", "guard_max_skips")


def refuse_what_does_nothing(values: Mapping[str, Any], *, place: Callable[[str], str]) -> None:
    """Refuse a setting that has no effect without another one that is missing.

    Args:
        values: Field → its value.
        place: Returns where a field was set.

    Raises:
        ConfigError: naming both settings.
    """
    for name, other in _NEEDS.items():
        if values[name] and values[other] is None:
            raise ConfigError(
                f"{name} does nothing without {other}.", place=place(name), fix=f"set {other}, or remove it."
            )
    for name, (other, value) in _NEEDS_VALUE.items():
        if values[name] and values[other] != value:
            raise ConfigError(
                f"{name} does nothing with {values[other]}.",
                place=place(name),
                fix=f'use {other}="{value}", or remove it.',
            )
    for name in _OF_GUARD:
        if values[name] is not None and values["guard"] == "off":
            raise ConfigError(f"{name} does nothing with guard off.", place=place(name), fix="remove it.")
