"""The launcher above a worker: find its process, and end the worker when it is gone.

The launcher of a single process (`accelerate launch`) neither forwards signals nor ends its worker, and a killed
torchrun leaves all of its workers behind. They would go on training and saving beside the next run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from accel_scale.errors import ConfigError

_LAUNCHER_PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
_LAUNCHER_MODULES = {
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "torch.distributed.launch",
}

# The time that a worker without a launcher has to finish its step and save.
GRACE_VARIABLE = "ACCEL_SCALE_ORPHAN_SECONDS"
_GRACE_SECONDS = 120.0
_POLL_SECONDS = 0.5
_MAX_LEVELS = 3  # allows for a wrapper script or two in between
_ended_by_launcher = 128 + signal.SIGTERM
_following: threading.Thread | None = None
_forking_pid = 0
_ends_forks = False


def launcher_of(pid: int) -> int | None:
    """The nearest `accelerate launch` or torchrun above process `pid`; None if there is none or it cannot be seen."""

    for _ in range(_MAX_LEVELS):
        pid = _parent_of(pid)
        if pid <= 1:
            break
        if is_launcher(pid):
            return pid
    return None


def _parent_of(pid: int) -> int:
    if pid == os.getpid():
        return os.getppid()
    try:
        # The second field is the program's name in parentheses, which may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def open_process(pid: int) -> int | None:
    """A descriptor that becomes readable when process `pid` ends; None if the system does not support it."""
    opener = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    with contextlib.suppress(OSError):
        return int(opener(pid))
    return None


def end_with_launcher() -> None:
    """From here on, this process does not outlive its launcher, and processes that it forks do not outlive it.

    The launcher's end counts as SIGTERM: a run that has begun saves and stops, anything earlier ends at once. A
    process that has not ended `GRACE_VARIABLE` seconds later (120 if unset), because it waits for a rank that is gone,
    is ended.

    Raises:
        ConfigError: if that variable is not a number.
    """
    global _following
    if _following is not None:
        return
    grace_seconds = _grace_seconds()
    _end_forks_with_this_process()
    launcher = launcher_of(os.getpid())
    if launcher is None:
        return
    _following = threading.Thread(
        target=_follow,
        args=(launcher, open_process(launcher), grace_seconds),
        name="accel-scale-launcher",
        daemon=True,
    )
    _following.start()


def _grace_seconds() -> float:
    text = os.environ.get(GRACE_VARIABLE, "")
    with contextlib.suppress(ValueError):
        seconds = float(text) if text else _GRACE_SECONDS
        if seconds >= 0:
            return seconds
    raise ConfigError(f"{text!r} is not a number of seconds.", place=GRACE_VARIABLE, fix="write it like 120.")


def _follow(launcher: int, descriptor: int | None, grace_seconds: float) -> None:
    _wait_for_end(launcher, descriptor)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    print(
        f"the launcher is gone, and this process (rank {os.environ.get('RANK', '0')}) could not stop within "
        f"{grace_seconds:g} s: it ends now. The last checkpoint is the one to continue from.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_ended_by_launcher)


def _wait_for_end(pid: int, descriptor: int | None) -> None:
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll():
            pass
        return
    while _is_running(pid):
        time.sleep(_POLL_SECONDS)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end_forks_with_this_process() -> None:
    """Make forks end with this process: data loaders' workers check every five seconds, those of pools never do."""
    global _ends_forks
    if not _ends_forks and hasattr(os, "register_at_fork"):
        _ends_forks = True
        os.register_at_fork(before=_note_forking, after_in_child=_end_with_parent)


def _note_forking() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _end_with_parent() -> None:
    parent = _forking_pid
    descriptor = open_process(parent)
    if descriptor is None and os.getppid() != parent:
        os._exit(_ended_by_launcher)

    def follow() -> None:
        _wait_for_end(parent, descriptor)
        os.kill(os.getpid(), signal.SIGKILL)

    # A signal to the process goes to any thread that does not block it; the main thread must decide which ones count.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=follow, name="accel-scale-parent", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def is_launcher(pid: int) -> bool:
    """True if process `pid` is `accelerate launch` or torchrun."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # `python -m` leaves the module's name in some places and its file in others.
    modules = {word.partition("/site-packages/")[2].removesuffix(".py").replace("/", ".") for word in words[:5]}
    names = {Path(word).name for word in words[:5]}
    return bool(names & _LAUNCHER_PROGRAMS or (modules | set(words[:5])) & _LAUNCHER_MODULES)
