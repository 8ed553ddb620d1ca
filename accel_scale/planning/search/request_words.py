"""Parses single words of a request: whole numbers, shares, and names from a list."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from accel_scale.errors import ConfigError


def whole(text: str, place: str) -> int:
    """A whole number above 0.

    Raises:
        ConfigError: for anything else.
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a whole number above 0.", place=place, fix="write it like 8.")
    return int(text)


def one_of(text: str, known: Iterable[str], place: str) -> str:
    """`text`, which must be one of `known`.

    Raises:
        ConfigError: naming the nearest.
    """
    known = tuple(known)
    if text not in known:
        near = difflib.get_close_matches(text, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{text!r} is unknown.", place=place, fix=f"{hint}use one of {', '.join(known)}.")
    return text


def share(text: str, place: str) -> float:
    """A number from 0 up to, but not including, 1.

    Raises:
        ConfigError: for anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"{text!r} is not a share.", place=place, fix="write it like 0.05.")
    return value
