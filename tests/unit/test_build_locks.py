"""Which ninja builds torch extensions; build locks are tested in test_checks.py, next to the doctor's rule on them."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from accel_scale.launching.build_locks import use_own_ninja


def script(folder: Path) -> str:
    folder.mkdir()
    path = folder / "ninja"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_environments_ninja_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, system = script(tmp_path / "own"), script(tmp_path / "system")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "own"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "system"), "/bin"]))
    use_own_ninja()
    assert shutil.which("ninja") == own
    before = os.environ["PATH"]
    use_own_ninja()
    assert os.environ["PATH"] == before, "once is enough"
    Path(own).unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    use_own_ninja()
    assert shutil.which("ninja") == system, "an environment without one leaves the system's"
    assert os.environ["PATH"] == str(tmp_path / "system")
