"""Size of the package and limits of its layout: `python tools/layout.py [--against REVISION]`, `--check`.

Counts lines of Python, files, uses of `Any` and public names. `--check` fails if a limit is broken in the package or
the recipes; `make lint` runs it. `--against` also counts another revision.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES_PER_FOLDER = 20
LINES_PER_FILE = {"accel_scale": 310, "recipes": 400}
# Uses of `Any` in package and recipes. Lower it whenever the count falls; never raise it.
MOST_ANY = 1159
MOST_PUBLIC_NAMES = 41


@dataclass(frozen=True)
class Size:
    """Size of a tree of Python files."""

    lines: int
    files: int
    any_uses: int
    public_names: int
    largest_folder: int
    largest_file: int


def python_files(root: Path) -> list[Path]:
    """Python files of the package and the recipes, sorted."""
    return sorted(path for folder in LINES_PER_FILE for path in (root / folder).rglob("*.py"))


def uses_of_any(tree: ast.AST) -> int:
    """Number of uses of `Any` as a name or an attribute."""
    names = sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))
    return names + sum(isinstance(node, ast.Attribute) and node.attr == "Any" for node in ast.walk(tree))


def public_names(root: Path) -> list[str]:
    """Names that `accel_scale` exports by importing them under their own names (`import x as x`)."""
    tree = ast.parse((root / "accel_scale" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports if (node.module or "").startswith("accel_scale") for alias in node.names]
    return [alias.name for alias in aliases if alias.asname == alias.name and not alias.name.startswith("__")]


def modules_by_folder(root: Path) -> Counter[str]:
    """Number of modules in each folder, without ``__init__.py``."""
    package = [path for path in python_files(root) if path.is_relative_to(root / "accel_scale")]
    return Counter(path.parent.relative_to(root).as_posix() for path in package if path.name != "__init__.py")


def size_of(root: Path) -> Size:
    """Size of the tree at `root`."""
    texts = [path.read_text(encoding="utf-8") for path in python_files(root)]
    lines = [len(text.splitlines()) for text in texts]
    return Size(
        lines=sum(lines),
        files=len(texts),
        any_uses=sum(uses_of_any(ast.parse(text)) for text in texts),
        public_names=len(public_names(root)),
        largest_folder=max(modules_by_folder(root).values()),
        largest_file=max(lines),
    )


def size_at(revision: str) -> Size:
    """Size of a revision, unpacked into a temporary folder."""
    command = ["git", "archive", revision, *LINES_PER_FILE]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return size_of(Path(folder))


def broken_limits(root: Path) -> list[str]:
    """One line for each broken limit."""
    size = size_of(root)
    lines = [
        f"{folder}: {count} modules, more than {MODULES_PER_FOLDER}"
        for folder, count in modules_by_folder(root).items()
        if count > MODULES_PER_FOLDER
    ]
    for path in python_files(root):
        name = path.relative_to(root)
        count, most = len(path.read_text(encoding="utf-8").splitlines()), LINES_PER_FILE[name.parts[0]]
        if count > most:
            lines.append(f"{name}: {count} lines, more than {most}")
    if size.any_uses > MOST_ANY:
        lines.append(f"{size.any_uses} uses of Any, more than {MOST_ANY}: give what is new its type")
    if size.public_names > MOST_PUBLIC_NAMES:
        lines.append(f"{size.public_names} public names, more than {MOST_PUBLIC_NAMES}")
    return lines


def table(columns: dict[str, Size]) -> str:
    """The sizes as a Markdown table."""
    rows = {
        "lines of Python in `accel_scale/` and `recipes/`": "lines",
        "files": "files",
        "uses of `Any`": "any_uses",
        "public names": "public_names",
        "modules in the largest folder": "largest_folder",
        "lines of the largest file": "largest_file",
    }
    head = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    cells = [[label, *(f"{getattr(size, field):,}" for size in columns.values())] for label, field in rows.items()]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in cells)])


def main() -> int:
    """Print the table, or check the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", metavar="REVISION", help="count this revision too")
    parser.add_argument("--check", action="store_true", help="fail where a limit is broken")
    args = parser.parse_args()
    if args.check:
        broken = broken_limits(ROOT)
        print("\n".join(broken) if broken else "layout: all limits hold")
        return int(bool(broken))
    columns = {f"`{args.against}`": size_at(args.against)} if args.against else {}
    print(table({**columns, "now": size_of(ROOT)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
