"""A connection to the process group's store that never blocks its caller for long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_Answers = queue.SimpleQueue[Any]


class StoreUnreachable(RuntimeError):
    """The store did not answer in time: its host is stopped, gone, or behind a broken network."""


class StoreLink:
    """Calls the store from a separate thread over a separate connection.

    A store's client waits for an answer without a limit and locks its connection meanwhile: a thread that used the
    main program's connection would block with it.

    Args:
        store: The default process group's store.
    """

    def __init__(self, store: Any) -> None:
        try:
            self._store = store.clone()  # torch 2.8 and later
            self._store.set_timeout(timedelta(seconds=60))
        except (AttributeError, RuntimeError):
            self._store = store
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], _Answers] | None] = queue.SimpleQueue()
        self._is_broken = False
        self._pending: _Answers | None = None
        self._thread = threading.Thread(target=self._serve, name="accel-scale-store-link", daemon=True)
        self._thread.start()

    def exchange(self, call: Callable[[Any], Any]) -> Any:
        """Start `call(store)` and return the result of the previous call; None while that is unanswered."""
        answer = None
        if self._pending is not None:
            try:
                answer = self._pending.get_nowait()
            except queue.Empty:
                return None
        self._pending = self._begin(call)
        return None if isinstance(answer, Exception) else answer

    def ask(self, call: Callable[[Any], Any], seconds: float) -> Any:
        """Return the result of `call(store)`.

        Raises:
            StoreUnreachable: after `seconds`, or at once if the connection is broken.
        """
        try:
            answer = self._begin(call).get(timeout=0.0 if self._is_broken else seconds)
        except queue.Empty:
            raise StoreUnreachable(f"no answer for {seconds:.0f} s") from None
        if isinstance(answer, Exception):
            raise StoreUnreachable(str(answer)) from answer
        return answer

    def close(self) -> None:
        """Let the thread end; a thread that is waiting for an answer is left behind."""
        self._calls.put(None)
        self._thread.join(timeout=1.0)

    def _begin(self, call: Callable[[Any], Any]) -> _Answers:
        answers: _Answers = queue.SimpleQueue()
        self._calls.put((call, answers))
        return answers

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, answers = item
            try:
                # A broken connection stays broken, and the store's client logs a page at every attempt.
                answers.put(StoreUnreachable("the connection is broken") if self._is_broken else call(self._store))
            except Exception as error:  # torch raises its own kinds of RuntimeError
                self._is_broken = True
                answers.put(error)
