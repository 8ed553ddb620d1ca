"""Builds of torch extensions: locks left by killed builds, and one ninja for all of them.

`torch.utils.file_baton.FileBaton` waits without limit for a lock to go away: one killed build hangs all later runs.
The process that holds a lock keeps the file open, which Linux shows under `/proc`.

torch takes the first ninja on the PATH. Versions cannot read each other's logs, so a different one rebuilds everything
(five minutes for DeepSpeed's operations), such as the system's ninja when the environment is not activated.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["build_locks", "remove_abandoned_locks", "stale_build_locks", "unheld_build_locks", "use_own_ninja"]


def use_own_ninja() -> None:
    """Put this environment's ninja, if it has one, first on this process's PATH."""
    scripts = sysconfig.get_path("scripts")
    own = shutil.which("ninja", path=scripts)
    if own is not None and shutil.which("ninja") != own:
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])


def build_locks() -> tuple[Path, ...]:
    """Every lock of a torch extension build, held or left behind."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    return tuple(sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]))


def unheld_build_locks() -> tuple[str, ...]:
    """Locks that no process of this machine holds; none if that cannot be determined.

    With a home directory on a network, the build may be running on another machine.
    """
    if not Path("/proc/self/fd").is_dir():
        return ()
    return tuple(str(lock) for lock in build_locks() if not _is_open(lock))


def stale_build_locks(older_than_seconds: float = 900) -> tuple[str, ...]:
    """Locks that no process of this machine holds and beside which nothing was written for `older_than_seconds`.

    The default is longer than one file takes to compile, so no other machine is building there either.
    """
    limit = time.time() - older_than_seconds
    return tuple(str(lock) for lock in build_locks() if _last_change(lock.parent) < limit and not _is_open(lock))


def remove_abandoned_locks() -> tuple[str, ...]:
    """Remove `unheld_build_locks` and return them: for machines that do not share their extension folder."""
    abandoned = unheld_build_locks()
    for lock in abandoned:
        Path(lock).unlink(missing_ok=True)
    return abandoned


def _is_open(file: Path) -> bool:
    """True if a process of this machine that we may inspect has `file` open; False without `/proc`."""
    try:
        wanted = file.stat()
    except FileNotFoundError:
        return False
    return any(os.path.samestat(wanted, found) for found in _open_files())


def _open_files() -> Iterator[os.stat_result]:
    """The files that processes of this machine have open; processes and files may vanish meanwhile."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    yield (process / "fd" / descriptor).stat()


def _last_change(folder: Path) -> float:
    """Seconds since the epoch of the newest file in `folder`; files may vanish meanwhile."""
    times = [0.0]
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(file.stat().st_mtime)
    return max(times)


if __name__ == "__main__":
    for removed in remove_abandoned_locks():
        print(f"Removed the lock of a build that was killed: {removed}", file=sys.stderr)
