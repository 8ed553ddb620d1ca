"""The catalogue's traced models ship with their facts, which must be those of the installed transformers' classes.

python tests/unit/test_shipped_facts.py     # reads them again and writes them
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import accel_scale.planning.models.catalogue as catalogue
from accel_scale.planning.models.traced import as_stored
from accel_scale.tracing.service import facts_of

CATALOGUE = Path(catalogue.__file__).parent / "data" / "models.json"
MODELS: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))


def read_again(name: str) -> dict[str, Any]:
    return json.loads(json.dumps(as_stored(facts_of(MODELS[name]["config"], name=name, place=name))))


@pytest.mark.parametrize("name", [name for name, item in MODELS.items() if "facts" in item])
def test_shipped_facts_are_those_of_the_class(name: str) -> None:
    assert read_again(name) == MODELS[name]["facts"]


def write() -> None:
    lines = []
    for name, item in MODELS.items():
        facts = {"facts": read_again(name)} if "facts" in item else {}
        lines.append(f"  {json.dumps(name)}: {json.dumps(item | facts)}")
    CATALOGUE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
