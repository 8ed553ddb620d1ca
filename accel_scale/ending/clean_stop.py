"""Stop all processes when one cannot continue: one line, one exit status, no process left in a collective."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import torch.distributed as dist

from accel_scale.ending.last_word import say_last
from accel_scale.facts.exit_statuses import OUT_OF_MEMORY_STATUS

_KEY = "accel_scale/out_of_memory"
_POLL_SECONDS = 1.0
_MEETING_SECONDS = 10.0


def group_store() -> dist.Store:
    """The store that `init_process_group` made; private in torch, in every version since 1.9 (checked on 2.13)."""
    return dist.distributed_c10d._get_default_store()


class CleanStop:
    """Lets any process end the run on all processes, wherever they are.

    A process that waits in a collective cannot be reached by another, so each has a thread that asks the rendezvous
    store once a second (one small message) whether any process has stopped.

    Args:
        program: Name at the start of the line, as in ``sft.py: memory ran out …``.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._store = group_store() if self._is_distributed else None

    def watch(self) -> None:
        """Start the thread, once; does nothing for a single process."""
        if self._is_distributed and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="accel-scale-clean-stop", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread; call before the process group is destroyed."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def stop(self, line: str) -> None:
        """Print `line` on rank 0 and end every process with `OUT_OF_MEMORY_STATUS`; does not return."""
        if self._store is None:
            self._speak(line)
            raise SystemExit(OUT_OF_MEMORY_STATUS)
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.set(_KEY, line)
        self._leave(line)

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                if self._store is None or not self._store.check([_KEY]):
                    continue
                line = self._store.get(_KEY).decode()
            except RuntimeError:  # the store's host has left
                return
            self._leave(line)

    def _leave(self, line: str) -> None:
        """Wait a little for the others, so that the launcher does not end rank 0 before it has printed the line."""
        self._lock.acquire()  # never released: the thread and the main program must not both do this
        if dist.get_rank() == 0:
            self._speak(line)
        with contextlib.suppress(RuntimeError):
            assert self._store is not None
            present = self._store.add(f"{_KEY}/present", 1)
            deadline = time.monotonic() + _MEETING_SECONDS
            while present < dist.get_world_size() and time.monotonic() < deadline:
                time.sleep(0.05)
                present = self._store.add(f"{_KEY}/present", 0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY_STATUS)  # the main program may be in a collective that never ends

    def _speak(self, line: str) -> None:
        say_last(f"{self._program}: {line}")
