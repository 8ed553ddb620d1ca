"""Stops a run as its scheduler would: SIGTERM to the process that holds its folder, which then saves and exits.

A PID in a file is no proof: the process may have ended and its PID may have been reused. A run is stopped only if its
folder is locked, the lock names this host, and the process with that PID belongs to this user, has the lock file open
and catches SIGTERM. Where the system has process descriptors, the signal goes through one, never to the PID.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.ending.launcher import open_process
from accel_scale.errors import ConfigError
from accel_scale.launching.folder_lock import LOCK_FILE, is_taken
from accel_scale.reporting.run_starts import has_open_start

if TYPE_CHECKING:
    from psutil import Process

_IN_A_TERMINAL = "stop it where it was started: Ctrl-C, or kill -TERM."


@dataclass(frozen=True)
class RunProcess:
    """The process that writes to a run's folder.

    Attributes:
        pid: Its PID.
        began: When it began, in seconds since the epoch; a later process with the same PID began later.
    """

    pid: int
    began: float


def process_of(folder: Path) -> RunProcess:
    """The process of the run in `folder`.

    Raises:
        ConfigError: if the process is not certain to be the run's, or cannot be stopped from here.
    """
    with _verified(folder) as (process, _):
        return RunProcess(process.pid, process.create_time())


def stop(folder: Path, expected: RunProcess) -> None:
    """Ask the run in `folder` to save and stop; returns immediately.

    Args:
        expected: The process shown to the user for confirmation.

    Raises:
        ConfigError: as `process_of`, and if a different process runs there now.
    """
    with _verified(folder) as (process, descriptor):
        if RunProcess(process.pid, process.create_time()) != expected:
            raise _refusal("another process runs there by now", fix="look again.")
        if descriptor is None:
            process.send_signal(signal.SIGTERM)
        else:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)


@contextlib.contextmanager
def _verified(folder: Path) -> Iterator[tuple[Process, int | None]]:
    """Yield the process and its descriptor after all checks have passed."""
    import psutil

    if not is_taken(folder) or not has_open_start(folder):
        raise _refusal("it is not training", fix="wait until its first step.")
    path = folder / LOCK_FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        pid, host = int(told["pid"]), str(told["host"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise _refusal("its lock does not say which process it is") from None
    if host != socket.gethostname():
        raise _refusal(f"it runs on {host[:100]}, not here")
    if pid <= 1 or pid == os.getpid():
        raise _refusal(f"process {pid} is no run")
    descriptor = open_process(pid)
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            raise _refusal(f"process {pid} is another user's")
        if not any(_is_lock(file.path, path) for file in process.open_files()):
            raise _refusal(f"process {pid} does not hold its folder")
        if not _catches_sigterm(pid):
            raise _refusal(f"process {pid} would end without saving", fix="wait until its first step.")
        yield process, descriptor
    except (psutil.NoSuchProcess, ProcessLookupError):
        raise _refusal(f"process {pid} has ended", fix="look again.") from None
    except (psutil.Error, OSError) as error:
        raise _refusal(f"process {pid} cannot be looked at ({type(error).__name__})") from None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_lock(opened: str, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(opened, path)
    return False


def _catches_sigterm(pid: int) -> bool:
    """True if the process handles SIGTERM, or if the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), None)
    return mask is None or bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def _refusal(why: str, *, fix: str = _IN_A_TERMINAL) -> ConfigError:
    return ConfigError(f"{why}.", place="Stop", fix=fix)
