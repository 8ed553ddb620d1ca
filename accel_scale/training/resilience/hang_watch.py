"""End a run whose collective never completes, with one line naming rank, step and operation, and one exit status."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from accel_scale.ending.last_word import say_last
from accel_scale.facts.exit_statuses import HUNG_STATUS
from accel_scale.training.resilience.flight_recorder import num_collectives, unfinished_collective
from accel_scale.training.resilience.hang_verdict import blamed, verdict
from accel_scale.training.resilience.heartbeat import Beat, locate, stacks
from accel_scale.training.resilience.store_link import StoreLink, StoreUnreachable

if TYPE_CHECKING:
    from torch.distributed import Store

DEFAULT_TIMEOUT_SECONDS = 1800.0
# The backend's own timeout comes later: it names neither rank nor step, and ends the process before we could report.
BACKEND_MARGIN_SECONDS = 60.0
_PREFIX = "accel_scale/hang"
_ANSWER_SECONDS = 15.0
_FAREWELL_SECONDS = 5.0

_current: weakref.ref[HangWatch] | None = None


def follow_steps(step_of: Callable[[], int]) -> None:
    """Make the process's watch, if there is one, get steps from `step_of`, which must not keep large objects alive."""
    watch = _current() if _current is not None else None
    if watch is not None:
        watch.step_of = step_of


class HangWatch:
    """A thread that locates this rank, tells the others once a second, and acts if it has waited too long.

    A rank waits if its Python stack, or torch's record of collectives, is inside a collective, and neither its step
    nor the number of collectives it has begun changes. After `timeout_seconds` of waiting it reads the others' last
    beats from the process group's store, one rank prints which rank is missing where, and all running ranks exit with
    `HUNG_STATUS`. Launchers then end the rest, or restart all of them.

    Args:
        program: Start of the printed line.
        timeout_seconds: Longer than the longest legitimate wait, e.g. for rank 0 to write a whole checkpoint.

    Attributes:
        step_of: Returns the rank's current step, from 1; 0 before training.
    """

    def __init__(self, program: str, timeout_seconds: float) -> None:
        import torch.distributed as dist

        self._program, self._timeout_seconds = program, timeout_seconds
        self._tick_seconds = min(1.0, timeout_seconds / 5)
        self._is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if self._is_distributed else 0
        self._world_size = dist.get_world_size() if self._is_distributed else 1
        # Otherwise rank 0 itself hosts the store.
        self._store_is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.step_of: Callable[[], int] = lambda: 0
        self._closed = threading.Event()
        self._link: StoreLink | None = None
        self._thread: threading.Thread | None = None
        self._count, self._still_since, self._last = 0, time.monotonic(), (0, 0)
        self._main_beat: Beat | None = None  # the last known beat of rank 0

    def start(self) -> HangWatch:
        """Start watching; does nothing for a single process."""
        global _current

        if not self._is_distributed or self._thread is not None:
            return self
        from accel_scale.ending.clean_stop import group_store

        self._link = StoreLink(group_store())
        self._thread = threading.Thread(target=self._watch, name="accel-scale-hang-watch", daemon=True)
        self._thread.start()
        _current = weakref.ref(self)
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Stop watching; call before the process group is destroyed."""
        atexit.unregister(self.close)
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._tick_seconds + 1)
        if self._link is not None:
            self._link.close()
            self._link = None

    def _watch(self) -> None:
        while not self._closed.wait(self._tick_seconds):
            beat = self._beat()
            if self._exchange(beat):
                self._leave()
            if beat.operation is not None and beat.still_seconds >= self._timeout_seconds:
                self._act(beat)

    def _beat(self) -> Beat:
        """The current state of this rank."""
        phase, operation = locate(next(iter(stacks([threading.main_thread()])), []))
        state, now = (self.step_of(), num_collectives()), time.monotonic()
        if state != self._last:
            self._last, self._still_since = state, now
        still = now - self._still_since
        if operation is None and still > 2 * self._tick_seconds:
            # DDP's reducer and CUDA streams wait without a Python frame.
            operation = unfinished_collective()
        self._count += 1
        return Beat(self._rank, state[0], phase, operation, state[1], still, self._count, time.time())

    def _exchange(self, beat: Beat) -> bool:
        """Publish the beat; returns True if another rank has ended the run."""
        key, main = f"{_PREFIX}/{self._rank}", f"{_PREFIX}/0"

        def call(store: Store) -> tuple[Beat | None, bool]:
            store.set(key, beat.as_json())
            heard = Beat.from_json(store.get(main)) if store.check([main]) else None
            return heard, bool(store.check([f"{_PREFIX}/over"]))

        assert self._link is not None
        self._main_beat, is_over = self._link.exchange(call) or (self._main_beat, False)
        return is_over

    def _act(self, beat: Beat) -> None:
        """Find out which rank is missing, report it, and leave, unless this rank is the one that others wait for."""
        assert self._link is not None
        try:
            before = self._all_beats()
            self._closed.wait(4 * self._tick_seconds + 1)
            beats = self._all_beats()
        except StoreUnreachable:
            self._say(self._verdict_without_store(self._beat()))
            self._exit()
        now = self._beat()
        if (now.progress, now.step) != (beat.progress, beat.step) or self._closed.is_set():
            return  # it has just continued
        silent = [
            rank
            for rank, seen in beats.items()
            if rank != self._rank
            and seen is not None
            and (old := before[rank]) is not None
            and seen.count == old.count
        ]
        if self._rank in blamed({**beats, self._rank: now}, silent):
            return
        line = verdict(now, beats, silent, time.time())
        with contextlib.suppress(StoreUnreachable):
            if self._link.ask(lambda store: store.add(f"{_PREFIX}/speakers", 1), _ANSWER_SECONDS) == 1:
                self._say(line)
                self._link.ask(lambda store: store.set(f"{_PREFIX}/over", line), _ANSWER_SECONDS)
        self._leave()

    def _all_beats(self) -> dict[int, Beat | None]:
        def call(store: Store) -> dict[int, Beat | None]:
            found: dict[int, Beat | None] = {}
            for rank in range(self._world_size):
                key = f"{_PREFIX}/{rank}"
                found[rank] = Beat.from_json(store.get(key)) if store.check([key]) else None
            return found

        assert self._link is not None
        beats: dict[int, Beat | None] = self._link.ask(call, _ANSWER_SECONDS + self._world_size / 50)
        return beats

    def _verdict_without_store(self, beat: Beat) -> str:
        if self._store_is_agents or self._rank == 0:
            return (
                f"rank {beat.rank} has waited {beat.still_seconds:.0f} s in {beat.operation or beat.phase} of step "
                f"{beat.step}, and the store that knows of the others does not answer: the first node, or its "
                "launcher, is gone"
            )
        return verdict(beat, {0: self._main_beat}, [0], time.time())  # rank 0 itself hosts the store

    def _say(self, line: str) -> None:
        say_last(f"{self._program}: {line}")

    def _leave(self) -> NoReturn:
        """End this process; a rank that may host the store first waits until the others know that the run is over."""
        # The first to leave breaks the others' connections: their main programs must not end with another status.
        sys.excepthook = lambda *error: self._exit()
        key, others = f"{_PREFIX}/heard", self._world_size - 1
        with contextlib.suppress(StoreUnreachable):
            assert self._link is not None
            heard = self._link.ask(lambda store: store.add(key, int(self._rank > 0)), _ANSWER_SECONDS)
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while self._rank == 0 and heard < others and time.monotonic() < deadline:
                time.sleep(0.1)
                heard = self._link.ask(lambda store: store.add(key, 0), _ANSWER_SECONDS)
        self._exit()

    def _exit(self) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(HUNG_STATUS)  # the main program hangs in a collective that never ends
