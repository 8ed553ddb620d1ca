"""The output of `accel-scale plan --json` as JSON Schema (2020-12), and a check of documents against it.

The schema is `accel_scale/assets/plan.schema.json` and works with any validator. This check supports only the
keywords it uses: type, properties, required, additionalProperties, items, anyOf and $ref.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import cast

Rule = Mapping[str, object]
SCHEMA = Path(__file__).resolve().parents[2] / "accel_scale/assets/plan.schema.json"

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list, tuple), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


@cache
def schema() -> Rule:
    """The parsed schema."""
    return cast("Rule", json.loads(SCHEMA.read_text(encoding="utf-8")))


def problems_of(document: object) -> list[str]:
    """Places where `document` violates the schema; empty if it is valid."""
    return list(_problems(document, schema(), ""))


def _problems(value: object, rule: Rule, place: str) -> Iterator[str]:
    here = place or "document"
    if "$ref" in rule:
        definitions = cast("Mapping[str, Rule]", schema()["$defs"])
        yield from _problems(value, definitions[str(rule["$ref"]).rpartition("/")[2]], place)
        return
    if "anyOf" in rule:
        found = [list(_problems(value, option, place)) for option in cast("list[Rule]", rule["anyOf"])]
        if all(found):
            yield from min(found, key=len)
        return
    if "type" in rule and not _is_of(value, cast("str | list[str]", rule["type"])):
        yield f"{here}: is no {rule['type']}"
        return
    if isinstance(value, dict):
        yield from _in_object(value, rule, place)
    if isinstance(value, (list, tuple)) and "items" in rule:
        for index, item in enumerate(value):
            yield from _problems(item, cast("Rule", rule["items"]), f"{place}[{index}]")


def _in_object(value: dict[str, object], rule: Rule, place: str) -> Iterator[str]:
    known, rest = cast("Mapping[str, Rule]", rule.get("properties", {})), rule.get("additionalProperties", True)
    prefix = f"{place}." if place else ""
    required = cast("list[str]", rule.get("required", []))
    yield from (f"{prefix}{name}: is missing" for name in required if name not in value)
    for name, item in value.items():
        if name in known:
            yield from _problems(item, known[name], f"{prefix}{name}")
        elif rest is False:
            yield f"{prefix}{name}: is not in the schema"
        elif isinstance(rest, Mapping):
            yield from _problems(item, rest, f"{prefix}{name}")


def _is_of(value: object, names: str | list[str]) -> bool:
    wanted = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in wanted
    return any(isinstance(value, _TYPES[name]) for name in wanted)
