"""Names: each class has one name, and each name belongs to one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "accel_scale"


def test_no_two_public_classes_share_a_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "\nclass " not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: places for name, places in found.items() if len(places) > 1}
