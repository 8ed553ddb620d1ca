"""The diagram of docs/architecture.md against the package's imports, including lazy ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "accel_scale"
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
BOXES = {
    name: rooms.split(" · ")
    for name, rooms in re.findall(r'^  (\w+)\["[^"<]+<br>([^"]+)"\]$', PAGE, re.MULTILINE)
    if name != "recipes"
}
BOX_OF = {room: name for name, rooms in BOXES.items() for room in rooms}
ARROWS = re.findall(r"^  (\w+) --> (\w+)$", PAGE, re.MULTILINE)


def room_of(module: str) -> str | None:
    """The longest name in the diagram's boxes that contains `module`."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in (2, 1))
    return next((name for name in names if name in BOX_OF), None)


def imports(path: Path) -> Iterator[str]:
    """Names of this package that a module imports, also inside functions but not for type checking only."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel_scale."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            todo += ast.iter_child_nodes(node)


def test_every_room_is_in_one_box():
    rooms = [room for rooms in BOXES.values() for room in rooms]
    assert len(rooms) == len(set(rooms))
    missing = {
        ".".join(path.with_suffix("").parts[-len(path.relative_to(PACKAGE).parts) :])
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
        and room_of(".".join(["accel_scale", *path.relative_to(PACKAGE).with_suffix("").parts])) is None
    }
    assert missing == set()
    for room in rooms:
        place = PACKAGE.joinpath(*room.split("."))
        assert place.is_dir() or place.with_suffix(".py").is_file(), room


def edges() -> set[tuple[str, str]]:
    """(room, room) for every import between rooms, including those of the recipes."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        room = room_of(".".join(["accel_scale", *path.relative_to(PACKAGE).with_suffix("").parts]))
        found |= {(room, to) for name in imports(path) if room and (to := room_of(name))}
    for path in (PACKAGE.parent / "recipes").glob("*.py"):
        found |= {("recipes", to) for name in imports(path) if (to := room_of(name))}
    return found


def test_every_arrow_is_an_import():
    between = {(BOX_OF.get(room, room), BOX_OF[to]) for room, to in edges()}
    assert len(ARROWS) >= 14
    assert set(ARROWS) <= between


def test_no_import_points_up():
    heights = {name: height for height, name in enumerate(BOXES)}
    up = {(room, to) for room, to in edges() if room != "recipes" and heights[BOX_OF[to]] < heights[BOX_OF[room]]}
    assert up == set()


def test_every_room_is_described():
    described = set(
        re.findall(r"`([\w/]+)/`", PAGE[PAGE.index("## Where to look") : PAGE.index("Outside the package")])
    )
    folders = {
        path.parent.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and path.parent != PACKAGE
    }
    # These are named in the row of their room.
    nested = {"data/pretraining", "parallel/pipelines"}
    nested |= {f"modeling/{name}" for name in ("fused", "packing", "recomputing", "tiling")}
    assert folders - nested <= described
    assert all((PACKAGE / name).is_dir() for name in described - {Path(name).name for name in nested})
