"""Signals that ask a run to save and stop: remembered where they arrive, acted on between two steps."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LAUNCHER_PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
_LAUNCHER_MODULES = {
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "torch.distributed.launch",
}
_PR_SET_PDEATHSIG = 1


class StopSignals:
    """Remembers SIGTERM, SIGUSR1 and Ctrl-C (SIGINT) instead of dying of them; a second Ctrl-C ends at once.

    Where the parent is `accelerate launch` or torchrun, its death counts as SIGTERM (Linux): the launcher of a
    single process does not forward signals, it dies and leaves the process behind.

    Attributes:
        received: Number of the first signal, 0 before it.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._asked_for_parents_death = False

    def install(self) -> None:
        """Replace the handlers; only the main thread can, elsewhere nothing is changed and nothing will be seen."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        parent = os.getppid()
        if sys.platform == "linux" and is_launcher(parent):
            self._asked_for_parents_death = _signal_at_parents_death(signal.SIGTERM)
            if os.getppid() != parent:  # it died just before
                self.received = signal.SIGTERM

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        if self._asked_for_parents_death:
            _signal_at_parents_death(0)
            self._asked_for_parents_death = False

    def _remember(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # Nothing else: Python runs this between two instructions of whatever the program was doing.
        self.received = self.received or number


def is_launcher(pid: int) -> bool:
    """Whether the process is `accelerate launch` or torchrun."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # `python -m` leaves the module's name in some places and its file in others.
    modules = {word.partition("/site-packages/")[2].removesuffix(".py").replace("/", ".") for word in words[:5]}
    names = {Path(word).name for word in words[:5]}
    return bool(names & _LAUNCHER_PROGRAMS or (modules | set(words[:5])) & _LAUNCHER_MODULES)


def _signal_at_parents_death(number: int) -> bool:
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False
