"""The message of a failing command, and the modules that it has imported by then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def said_with_imports(folder: Path, words: list[str]) -> tuple[str, set[str]]:
    """The single error line of a command run in `folder` that exits with status 2, and the names of its imports."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=folder, env=env, timeout=60, check=False
    )
    lines = done.stderr.splitlines()
    (said,) = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 2
    return said, {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
