"""Reads the fields of a Hugging Face config.json, with checks that name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_scale.errors import ConfigError


@dataclass(frozen=True)
class ConfigFields:
    """A config's values over its class's defaults. A field that is ``null`` is `None`, as in transformers.

    Attributes:
        values: Values in the file.
        defaults: Defaults of the transformers class for fields that are not in the file.
        place: The file or model, for error messages.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    place: str

    def get(self, name: str) -> Any:
        """The field as it stands; `None` if neither file nor class has it."""
        return self.values.get(name, self.defaults.get(name))

    def whole(self, name: str) -> int:
        """A positive whole number.

        Raises:
            ConfigError: if the field is missing or something else.
        """
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(name, "a positive whole number")
        return value

    def whole_or_none(self, name: str) -> int | None:
        """A positive whole number, or `None` if the field is ``null`` or missing."""
        return None if self.get(name) is None else self.whole(name)

    def flag(self, name: str | bool) -> bool:
        """A truth value; a `bool` in place of a name stands for itself.

        Raises:
            ConfigError: if the field is neither true nor false.
        """
        value = name if isinstance(name, bool) else self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(str(name), "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """A string.

        Raises:
            ConfigError: if the field is missing or something else.
        """
        value = self.get(name)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def largest(self, *names: str) -> float:
        """The largest of some probabilities; missing ones count as 0.

        Raises:
            ConfigError: if one is not a number from 0 to 1.
        """
        for name in names:
            value = self.get(name) or 0.0
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise self.error(name, "a number from 0 to 1")
        return max(float(self.get(name) or 0.0) for name in names)

    def fraction(self, name: str) -> float:
        """The share of a head that gets rotary embeddings, from the top level or the rope parameters.

        Raises:
            ConfigError: if it is not a number over 0, up to 1.
        """
        values = [(self.get(group) or {}) for group in ("rope_parameters", "rope_scaling")]
        nested = [group[name] for group in values if isinstance(group, Mapping) and group.get(name) is not None]
        value = nested[0] if nested else self.get(name)
        value = 1.0 if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise self.error(name, "a number over 0, up to 1")
        return float(value)

    def error(self, name: str, wanted: str) -> ConfigError:
        """The error for a field with an invalid value."""
        return ConfigError(f"{name} is {self.get(name)!r}.", place=self.place, fix=f"give {name} {wanted}.")
