"""`run_summary.json`: what was run, with which versions, and the results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from accel_scale.launching.machine import PACKAGES, installed_packages
from accel_scale.secrets import without_secrets

SUMMARY_NAME = "run_summary.json"


def write_summary(folder: str | os.PathLike[str], content: dict[str, Any], *, name: str = SUMMARY_NAME) -> Path:
    """Write `content` with versions, machine and date to ``folder/run_summary.json``, atomically.

    Values under credential names (``hub_token`` and the like) are left out; credentials within texts are masked.
    """
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(without_secrets(described(content)), indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def described(content: dict[str, object]) -> dict[str, object]:
    """`content` with versions, machine, date and commit."""
    return {
        **content,
        "versions": installed_versions(),
        "machine": machine(),
        "date": _now(),
        "commit": _commit(),
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that affect a run, by distribution name; missing packages are left out."""
    return {"python": platform.python_version(), **installed_packages((*PACKAGES, "optuna"))}


def machine() -> dict[str, Any]:
    """Devices, cores, memory and system visible to this process."""
    import psutil
    import torch

    cuda = torch.cuda.is_available()
    return {
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _commit() -> str | None:
    """Commit of the checkout the package runs from; `None` if it does not run from one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None
