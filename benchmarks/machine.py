"""The machine and versions with which a result was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "trl", "accelerate")


def machine() -> dict[str, Any]:
    """Hardware, versions, date and commit that results depend on."""
    cpu = next(
        (s.split(":")[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), ""
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
    }
