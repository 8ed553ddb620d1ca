"""docs/private-apis.md names every private library name that the package uses, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "private-apis.md").read_text(encoding="utf-8")
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "accel_scale").rglob("*.py")}
# Public in spite of their names.
PUBLIC = {"_exit", "_current_frames", "_asdict", "_fields", "_replace"}


def is_private(name: str) -> bool:
    """True if the name begins with exactly one underscore and is not public."""
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_names() -> set[str]:
    """Names that the package itself defines, on its own objects or on those of others."""
    names = {"_loss_from_logits"}  # set on a model and read by its new forward
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
            elif isinstance(node, ast.keyword):
                names.add(str(node.arg))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
                names.add(node.value)  # the name of a marker that setattr and getattr share
    return names


def used_names() -> dict[str, list[str]]:
    """Private names defined elsewhere, and the places that use them."""
    own, found = own_names(), defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                found[node.attr].append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("accel_scale"):
                parts = [part for part in node.module.split(".") if is_private(part)]
                for name in [*parts, *(alias.name for alias in node.names if is_private(alias.name))]:
                    found[name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return dict(found)


def test_the_table_names_what_is_used():
    named = {
        part
        for line in PAGE.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(_[\w.]+)`", line.split("|")[1])
        for part in name.split(".")
    }
    used = used_names()
    assert {name: places for name, places in used.items() if name not in named} == {}
    texts = "".join(path.read_text(encoding="utf-8") for path in TREES)
    assert {name for name in named if name.startswith("_") and not re.search(rf"\b{name}\b", texts)} == set()
