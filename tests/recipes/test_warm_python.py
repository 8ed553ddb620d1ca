"""The stand-in for python that the tests' launches use: it has the project's modules, or those of another copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import is_warm

ASKED = "import sys; known = len([m for m in sys.modules if m.startswith('accel_scale.')]); import accel_scale as a; "
ASKED += "print(known, a.__file__)"


def answer(path: Path) -> tuple[int, Path]:
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", ASKED], env=env, cwd=path, capture_output=True, text=True, check=True)
    known, file = done.stdout.split(maxsplit=1)
    return int(known), Path(file.strip())


def test_the_projects_modules_are_imported_and_those_of_another_copy_take_their_place(
    repository: Path, tmp_path: Path
) -> None:
    if not is_warm():
        pytest.skip("a full Python starts here")
    (tmp_path / "accel_scale").mkdir()
    (tmp_path / "accel_scale" / "__init__.py").touch()
    known, file = answer(repository)
    assert known > 300
    assert file == repository / "accel_scale" / "__init__.py"
    assert answer(tmp_path) == (0, tmp_path / "accel_scale" / "__init__.py")


def test_a_variable_that_libraries_read_is_left_behind() -> None:
    os.environ["HF_LEFT_BEHIND"] = "by the test before"


def test_and_does_not_make_the_next_launches_cold() -> None:
    """A run with `--hub_token` in this process sets HF_TOKEN; launches with it would all start a full Python."""
    assert "HF_LEFT_BEHIND" not in os.environ
