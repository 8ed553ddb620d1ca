"""Runs a command and ends it with everything it started, even if the parent process is killed.

`python -m accel_scale.tuning.process_guard GRACE_SECONDS COMMAND…` runs COMMAND until it ends or standard input is
closed. Standard input is a pipe held by the parent; the system closes it however the parent dies.
Launchers start workers in sessions of their own, so signalling a process group is not enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_POLL_SECONDS = 0.1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status, or 128 + SIGTERM if the guard ended it."""
    grace_seconds, command = float(argv[0]), argv[1:]
    _adopt_orphans()
    asked_to_end: list[int] = []
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, lambda number, frame: asked_to_end.append(number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None and not asked_to_end and not _input_ended():
        pass
    ended = child.poll() is None
    # Also when the launcher has already ended: a killed launcher leaves its workers behind.
    end_tree(psutil.Process(), grace_seconds=grace_seconds)
    if ended:
        return 128 + signal.SIGTERM
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end_tree(root: psutil.Process, *, grace_seconds: float) -> None:
    """Terminate all descendants of `root`, new ones included, and kill those left after `grace_seconds`."""
    deadline = time.monotonic() + grace_seconds
    asked: set[psutil.Process] = set()
    while True:
        running = _running_below(root)
        late = time.monotonic() >= deadline
        for process in running:
            with contextlib.suppress(psutil.Error):
                if late:
                    process.kill()
                elif process not in asked:
                    process.terminate()
        asked.update(running)
        if not running:
            return
        time.sleep(_POLL_SECONDS / 2)


def _running_below(root: psutil.Process) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _input_ended() -> bool:
    """Wait a moment; returns True if the other end of the pipe is gone."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
    except InterruptedError:
        return False
    return bool(ready) and not os.read(sys.stdin.fileno(), 1024)


def _adopt_orphans() -> None:
    """On Linux, make workers whose launcher has died children of this process rather than of init."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
