"""Importing the package is light, and every public name resolves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import accel_scale


def test_import_brings_no_heavy_library() -> None:
    code = "import sys, accel_scale; print([m for m in ('torch', 'transformers', 'trl', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    for name in accel_scale.__all__:
        assert getattr(accel_scale, name) is not None, name
    assert set(accel_scale.__all__) == set(dir(accel_scale))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(accel_scale, "no_such_name")


def test_every_public_name_is_documented() -> None:
    """The table of names in docs/library.md lists every public name and nothing else."""
    text = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
    table = text[text.index("| name | use |") :]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(accel_scale.__all__) - {
        "__version__"
    }
