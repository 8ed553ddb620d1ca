"""One run at a time in an output folder: a lock that the kernel releases however its holder dies.

``flock`` works on local disks and on NFS 4 and Lustre mounted with ``flock``. If a file system has no locks, the run
says so and continues: nothing keeps a second run out there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from accel_scale.errors import ConfigError

LOCK_FILE = "_run.lock"
# A run restarted immediately waits for the previous one to end.
WAIT_SECONDS_VARIABLE = "ACCEL_SCALE_LOCK_SECONDS"
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[Path, int] = {}
_knows_forks = False


@contextlib.contextmanager
def held(folder: Path, *, place: str = "--output_dir", wait_seconds: float | None = None) -> Iterator[None]:
    """Lock `folder` against other processes; within this process it may be held several times.

    Args:
        folder: An existing folder.
        place: The setting that errors name.
        wait_seconds: How long to wait for a holder that is ending; None: ``ACCEL_SCALE_LOCK_SECONDS``, or 10.

    Raises:
        ConfigError: if another process holds it during all that time.
        OSError: if the lock file cannot be written.
    """
    path = _lock_path(folder)
    if is_held(folder):
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _wait_for(descriptor, _seconds() if wait_seconds is None else wait_seconds):
            raise ConfigError(
                f"{folder} is in use by {_holder(path)}.",
                place=place,
                fix="wait for that run, end it, or name another folder.",
            )
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _held[path] = descriptor
        _let_go_in_forks()
        yield
    finally:
        _held.pop(path, None)
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """True if this process holds `folder`."""
    return _lock_path(folder) in _held


def is_taken(folder: Path) -> bool:
    """True if any process holds `folder`; False if that cannot be determined."""
    try:
        import fcntl

        with open(_lock_path(folder), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def _lock_path(folder: Path) -> Path:
    return Path(os.path.realpath(folder)) / LOCK_FILE


def _seconds() -> float:
    text = os.environ.get(WAIT_SECONDS_VARIABLE, "")
    with contextlib.suppress(ValueError):
        return float(text) if text else _WAIT_SECONDS
    raise ConfigError(f"{text!r} is not a number of seconds.", place=WAIT_SECONDS_VARIABLE, fix="write it like 10.")


def _wait_for(descriptor: int, seconds: float) -> bool:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return True
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"warning: this file system has no locks ({error.strerror}): see that one run at a time uses the "
                "output folder.",
                file=sys.stderr,
            )
            return True


def _holder(path: Path) -> str:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(told['pid'])} on {told['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _let_go_in_forks() -> None:
    """Close the lock in forks: data loaders' workers inherit it, and one outliving the run would keep the folder."""
    global _knows_forks
    if not _knows_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)
        _knows_forks = True


def _close_all() -> None:
    for descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
