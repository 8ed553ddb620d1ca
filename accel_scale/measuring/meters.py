"""Meters for tokens per second without padding, time spent waiting for data, and peak memory of a run."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class HostClock:
    """Clock of a synchronous device, whose work is done when a call returns."""

    def now(self) -> float:
        """Time in seconds, after all started work is done."""
        return time.perf_counter()

    def mark(self) -> Any:
        """Mark a point in the device's work, for `between`."""
        return time.perf_counter()

    def between(self, earlier: Any, later: Any) -> float:
        """Device time in seconds between two marks that it has reached."""
        return float(later - earlier)


class EventClock(HostClock):
    """Clock of an asynchronous device: calls return immediately, and events record when the device reached them."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def now(self) -> float:
        import torch

        torch.accelerator.synchronize()
        return time.perf_counter()

    def mark(self) -> Any:
        import torch

        event = torch.Event(self._device_type, enable_timing=True)
        event.record()
        return event

    def between(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device_type: str) -> HostClock:
    """The clock for a device of `device_type`."""
    return EventClock(device_type) if device_type in ("cuda", "xpu") else HostClock()


class Pace(NamedTuple):
    """Speed of some steps on this rank, and the share of their time spent waiting for data."""

    tokens_per_second: float
    step_seconds: float
    data_wait_ratio: float


@dataclass
class ThroughputMeter:
    """Counts non-padding tokens, the time of optimizer steps, and the part of it spent waiting for data.

    The first step is left out of the rates, since it includes allocation, compilation and the first batch. Logging,
    evaluation and saving happen between steps and are left out too: the step before them ends with `settle`. Other
    steps of an asynchronous device overlap, and nothing waits for it.

    Args:
        clock: Clock of the device that computes.
    """

    clock: HostClock = field(default_factory=HostClock)
    num_tokens: int | torch.Tensor = 0
    num_steps: int = 0
    data_seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_steps: int = 0
    timed_tokens: int | torch.Tensor = 0
    _began: float | None = field(default=None, repr=False)
    _tokens_before: int | torch.Tensor = field(default=0, repr=False)
    _steps_before: int = field(default=0, repr=False)
    _asked: tuple[float, Any] = field(default=(0.0, None), repr=False)
    _waits: list[tuple[float, Any, Any]] = field(default_factory=list, repr=False)
    _asked_at: tuple[float, float, float, int] = field(default=(0.0, 0.0, 0.0, 0), repr=False)

    def start_step(self) -> None:
        """Call before the first micro-batch of an optimizer step is fetched."""
        started = time.perf_counter()
        if self._began is None:
            self._began, self._tokens_before, self._steps_before = started, self.num_tokens, self.num_steps
        self._asked = started, self.clock.mark()

    def since_start(self) -> float:
        """Host time in seconds since the step began."""
        return time.perf_counter() - self._asked[0]

    def fetched(self) -> None:
        """Call when the step's micro-batches have arrived."""
        started, mark = self._asked
        self._waits.append((time.perf_counter() - started, mark, self.clock.mark()))

    def add_tokens(self, num_tokens: int | torch.Tensor) -> None:
        """Count the tokens of one micro-batch on this rank; a tensor stays on its device until it is read."""
        self.num_tokens = self.num_tokens + num_tokens

    def end_step(self, *, settle: bool = True) -> None:
        """Call after the optimizer step, with `settle` if anything but the next step follows."""
        self.num_steps += 1
        if not settle and self.num_steps > 1:
            return
        ended, began = self.clock.now(), self._began
        if self.num_steps > 1 and began is not None:
            self.timed_seconds += ended - began
            # While the device is still busy with the previous step, the host's wait for data costs nothing.
            self.data_seconds += sum(min(wait, self.clock.between(*marks)) for wait, *marks in self._waits)
            self.timed_steps += self.num_steps - self._steps_before
            self.timed_tokens = self.timed_tokens + (self.num_tokens - self._tokens_before)
        self._began, self._waits = None, []

    def pace(self) -> Pace | None:
        """Pace of the steps timed since the last call; None if there are none."""
        now = float(self.timed_tokens), self.timed_seconds, self.data_seconds, self.timed_steps
        tokens, seconds, waited, steps = (after - before for after, before in zip(now, self._asked_at, strict=True))
        if not steps or not seconds:
            return None
        self._asked_at = now
        return Pace(tokens / seconds, seconds / steps, waited / seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on this rank; `None` before the second step."""
        return float(self.timed_tokens) / self.timed_seconds if self.timed_seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds per optimizer step; `None` before the second step."""
        return self.timed_seconds / self.timed_steps if self.timed_steps else None

    @property
    def data_wait_ratio(self) -> float | None:
        """Share of the step time spent waiting for data; `None` before the second step."""
        return self.data_seconds / self.timed_seconds if self.timed_seconds else None


@dataclass(frozen=True)
class Counted:
    """Totals of a run over all its starts: tokens over all ranks, times of rank 0."""

    tokens: float = 0.0
    seconds: float = 0.0
    data_seconds: float = 0.0
    timed_seconds: float = 0.0

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Counted:
        """Restore from a checkpoint's state; checkpoints of earlier versions lack some fields."""
        return cls(**{name.name: kept[name.name] for name in fields(cls) if name.name in kept})

    def and_now(self, meter: ThroughputMeter, *, tokens: float, started: float) -> Counted:
        """Add the current start, which began at `started` by `time.perf_counter`."""
        return Counted(
            self.tokens + tokens,
            self.seconds + time.perf_counter() - started,
            self.data_seconds + meter.data_seconds,
            self.timed_seconds + meter.timed_seconds,
        )

    @property
    def data_wait_ratio(self) -> float | None:
        """Share of the step time spent waiting for data; `None` before the second step."""
        return self.data_seconds / self.timed_seconds if self.timed_seconds else None


def peak_host_bytes() -> int:
    """High-water mark of this process's resident memory, in bytes (`getrusage(2)`)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> dict[str, int] | None:
    """Peak allocated and reserved bytes of the current CUDA device; `None` without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def peak_memory_bytes() -> int:
    """Peak memory of this process: on its CUDA device if there is one, else on the host."""
    device = peak_device_bytes()
    return device["allocated_bytes"] if device else peak_host_bytes()


def logged_figures(meter: ThroughputMeter, *, ranks: float = 1.0) -> dict[str, float]:
    """Speed since the last line and current memory for `metrics.jsonl`, from counters without a device sync.

    Args:
        ranks: Number of ranks with their own tokens, taken to be as fast as this one.
    """
    import psutil
    import torch

    pace = meter.pace()
    found: dict[str, float] = {} if pace is None else pace._asdict()
    if pace is not None:
        found["tokens_per_second"] *= ranks
    found["host_bytes"] = psutil.Process().memory_info().rss
    if torch.cuda.is_available():
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()  # peak so far
        found["reserved_bytes"] = torch.cuda.memory_reserved()
    return found
