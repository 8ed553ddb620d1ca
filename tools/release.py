"""Check before a release that the tag, both versions and the newest changelog section agree.

    python tools/release.py --tag v0.1.0

Prints each place that differs and then exits with 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def versions(repository: Path) -> dict[str, str | None]:
    """The version stated in each place; None if it states none."""
    patterns = {
        "pyproject.toml": r'^version = "([^"]+)"$',
        "accel_scale/version.py": r'^__version__ = "([^"]+)"$',
        "CHANGELOG.md": r"^## \[(\d[^\]]*)\]",
    }
    found = {place: re.search(pattern, _read(repository / place), re.MULTILINE) for place, pattern in patterns.items()}
    return {place: match and match.group(1) for place, match in found.items()}


def problems(tag: str, stated: dict[str, str | None]) -> list[str]:
    """One line for each place that does not state the tag's version."""
    wanted = tag.removeprefix("v")
    return [f"{place} says {version}, the tag {tag}" for place, version in stated.items() if version != wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Print what differs; returns 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", required=True, help="such as v0.1.0")
    lines = problems(parser.parse_args(argv).tag, versions(REPOSITORY))
    print("\n".join(lines) or "tag, versions and changelog agree")
    return int(bool(lines))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
