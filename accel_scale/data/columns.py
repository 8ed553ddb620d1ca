"""Parse ``--columns role=column`` and check it against the existing columns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from accel_scale.errors import ConfigError
from accel_scale.facts.names import COLUMN_ROLES as ROLES


def parse_columns(items: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """``["prompt=question", …]`` → ``{"prompt": "question", …}``.

    Raises:
        ConfigError: no ``=``, a role that does not exist (the nearest one is suggested), or one named twice.
    """
    pairs = list(items.items()) if isinstance(items, Mapping) else [_split_pair(item) for item in items]
    mapping: dict[str, str] = {}
    for role, column in pairs:
        if role not in ROLES:
            near = difflib.get_close_matches(role, ROLES, n=1)
            fix = f"did you mean {near[0]}={column}?" if near else f"use one of {', '.join(ROLES)}."
            raise ConfigError(f"{role!r} is not a role a column can have.", place="--columns", fix=fix)
        if role in mapping:
            raise ConfigError(f"the role {role!r} is mapped twice.", place="--columns", fix="map it once.")
        mapping[role] = column
    mains = [name for name in ("messages", "prompt", "text") if name in mapping]
    if "completion" in mapping and "prompt" not in mains:
        mains.append("prompt")
    if len(mains) > 1:
        raise ConfigError(
            f"the roles {' and '.join(sorted(set(mapping) & set(ROLES[:4])))} belong to different formats.",
            place="--columns",
            fix="map messages, or prompt and completion, or text.",
        )
    return mapping


def _split_pair(item: str) -> tuple[str, str]:
    role, equals, column = item.partition("=")
    if not equals or not role or not column:
        raise ConfigError(f"{item!r} is not role=column.", place="--columns", fix="write e.g. prompt=question.")
    return role, column


def check_columns(mapping: Mapping[str, str], columns: Sequence[str], source: str) -> None:
    """Raise a ConfigError if a mapped column is not one of `columns`, suggesting the nearest."""
    for role, column in mapping.items():
        if column in columns:
            continue
        near = difflib.get_close_matches(column, columns, n=1)
        fix = f"did you mean {role}={near[0]}?" if near else f"{source} has the columns {', '.join(columns)}."
        raise ConfigError(f"{source} has no column {column!r}.", place=f"--columns {role}={column}", fix=fix)
