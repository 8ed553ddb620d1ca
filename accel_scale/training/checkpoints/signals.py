"""Signals that ask a run to save and stop: recorded on arrival, handled between two steps."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Any

from accel_scale.data.loaders import outlive_signals
from accel_scale.ending.launcher import is_launcher

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
_num_installed = 0
_follows_forks = False


class StopSignals:
    """Records SIGTERM, SIGUSR1 and Ctrl-C (SIGINT) instead of dying from them; a second Ctrl-C ends the process.

    If the parent is `accelerate launch` or torchrun, its death counts as SIGTERM (Linux): the launcher of a single
    process does not forward signals; it dies and leaves the process behind. Workers forked meanwhile, such as a data
    loader's, survive a signal to the whole group, because a run without them could not save.

    Attributes:
        received: Number of the first signal; 0 until then.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._asked_for_parents_death = False

    def install(self) -> None:
        """Replace the handlers. Works only in the main thread; elsewhere nothing changes and no signal is recorded."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        _count_installed(1)
        parent = os.getppid()
        if sys.platform == "linux" and is_launcher(parent):
            self._asked_for_parents_death = _signal_at_parents_death(signal.SIGTERM)
            if os.getppid() != parent:  # the parent died just before
                self.received = signal.SIGTERM

    def restore(self) -> None:
        """Restore the previous handlers."""
        if self._previous:
            _count_installed(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        if self._asked_for_parents_death:
            _signal_at_parents_death(0)
            self._asked_for_parents_death = False

    def _remember(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # Do no more: Python runs this between any two instructions of the program.
        self.received = self.received or number


def _count_installed(change: int) -> None:
    global _num_installed, _follows_forks
    _num_installed += change
    if not _follows_forks and hasattr(os, "register_at_fork"):
        _follows_forks = True
        os.register_at_fork(after_in_child=_protect_worker)


def _protect_worker() -> None:
    if _num_installed:
        outlive_signals()


def _signal_at_parents_death(number: int) -> bool:
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False
