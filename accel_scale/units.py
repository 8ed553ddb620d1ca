"""Bytes as people write them: ``24GiB``, ``1.5e9``, ``80 GB``."""

from __future__ import annotations

import re

from accel_scale.errors import ConfigError

_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int, *, place: str | None = None) -> int:
    """Bytes in `text`: decimal units (``GB`` = 10⁹) and binary ones (``GiB`` = 2³⁰), case-insensitive.

    Raises:
        ConfigError: if `text` is not a positive amount with a known unit.
    """
    match = _PATTERN.fullmatch(str(text))
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or float(match.group(1)) <= 0:
        raise ConfigError(f"{text!r} is not an amount of memory.", place=place, fix="write it like 24GiB or 80GB.")
    return int(float(match.group(1)) * factor)


def three_digits(value: float) -> str:
    """`value` with three significant digits, or as a whole number if that has more; large numbers get no exponent."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` with a binary unit and three significant digits, e.g. ``22.4 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{three_digits(value)} {unit}"
        value /= 1024
    return f"{three_digits(value)} TiB"


_DURATION_UNITS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s)\s*", re.IGNORECASE)


def parse_duration(text: str | float, *, place: str | None = None) -> float:
    """Seconds in ``90m``, ``11h30m``, ``45 s`` or ``2d``; a bare number is seconds.

    Raises:
        ConfigError: if `text` is not a positive length of time.
    """
    stripped = str(text).strip()
    parts = _DURATION.findall(stripped)
    if parts and not _DURATION.sub("", stripped):
        seconds = sum(float(number) * _DURATION_UNITS[unit.lower()] for number, unit in parts)
    else:
        try:
            seconds = float(stripped)
        except ValueError:
            seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{text!r} is not a length of time.", place=place, fix="write it like 90m or 11h30m.")
    return seconds
