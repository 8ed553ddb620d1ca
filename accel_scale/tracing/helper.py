"""A second process that makes some of a plan's traces, so that the first plan of a model takes less time.

It is started for `accel-scale plan` on Linux with a second core. Without it, or if it dies, everything is traced here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

# Most calls that are shared with a helper.
_MOST = 128
# Nothing is compiled here, but bitsandbytes would import torch's compiler.
_DISABLES = "TORCHDYNAMO_DISABLE"
Call = Callable[[], object]


class SecondProcess:
    """A forked process that gets a module ready, then makes calls from the end of a list, where the longest are.

    It is forked before torch is imported, because torch's threads would not survive it.
    """

    def __init__(self, module: str) -> None:
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self._is_taken = context.Array("b", _MOST)
        self._results: dict[int, object] = {}
        self._has_ended = False
        self._changed = threading.Condition()
        self._calls: Sequence[Call] = ()
        self._process = context.Process(target=self._work, args=(module, there), daemon=True)
        self._process.start()
        there.close()

    def share(self, calls: Sequence[Call]) -> None:
        """Share calls, of which the last is made first; only the first list is shared."""
        if not self._calls:
            self._calls = calls[:_MOST]
            threading.Thread(target=self._exchange, daemon=True).start()

    def result_of(self, index: int) -> object:
        """The result of a shared call; None if it is to be made here. While the helper makes it, others are made."""
        if index >= len(self._calls) or self._take(index):
            return None
        for other in reversed(range(len(self._calls))):
            with self._changed:
                if index in self._results or self._has_ended:
                    break
            if self._take(other):
                result = _made(self._calls[other])
                with self._changed:
                    self._results[other] = result
        with self._changed:
            self._changed.wait_for(lambda: index in self._results or self._has_ended)
            return self._results.get(index)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def _take(self, index: int) -> bool:
        """Take a call; False if it is taken."""
        with self._is_taken.get_lock():
            was_taken = self._is_taken[index]
            self._is_taken[index] = 1
        return not was_taken

    def _exchange(self) -> None:
        """In a thread, so that the helper never waits for what is traced here."""
        with contextlib.suppress(EOFError, OSError):
            self._here.send(self._calls)
            while True:
                index, result = self._here.recv()
                with self._changed:
                    self._results[index] = result
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _work(self, module: str, there: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
        self._here.close()
        importlib.import_module(module).get_ready()
        with contextlib.suppress(EOFError, OSError):
            calls = there.recv()
            for index in range(len(calls) - 1, -1, -1):
                if self._take(index):
                    there.send((index, _made(calls[index])))


def _made(call: Call) -> object:
    """The result of a call; None if it fails: it is made again where it is needed, and its error is reported there."""
    try:
        return call()
    except Exception:
        return None


class _State:
    is_allowed = False
    helper: SecondProcess | None = None


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Allow a helper within this context; it ends with the context. The program must have no other threads by then."""
    _State.is_allowed = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1
    compiles = os.environ.get(_DISABLES)
    try:
        yield
    finally:
        _State.is_allowed = False
        if _State.helper is not None:
            _State.helper.end()
            _State.helper = None
            os.environ.pop(_DISABLES)
            if compiles is not None:
                os.environ[_DISABLES] = compiles
            # As the interpreter ends, it would look for cycles among torch's objects for more than a second.
            gc.freeze()


def started(module: str) -> SecondProcess | None:
    """The helper, started if one is allowed and it is not too late; it calls `module`'s ``get_ready`` first."""
    if _State.is_allowed and _State.helper is None and "torch" not in sys.modules:
        os.environ[_DISABLES] = "1"
        _State.helper = SecondProcess(module)
    return _State.helper
