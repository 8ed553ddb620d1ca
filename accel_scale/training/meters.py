"""Tokens per second without padding, waiting for data, and peak memory of a run."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class ThroughputMeter:
    """Counts tokens that carry content (no padding), the time optimizer steps take and the part spent on data.

    The first step is left out of the rates: it pays for allocation, compilation and the first batch. Logging,
    evaluation and saving happen between steps and are left out too.
    """

    num_tokens: int | torch.Tensor = 0
    num_steps: int = 0
    data_seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_tokens: int | torch.Tensor = 0
    _step_started: float = field(default=0.0, repr=False)
    _fetched: float = field(default=0.0, repr=False)
    _tokens_before: int | torch.Tensor = field(default=0, repr=False)

    def start_step(self) -> None:
        """Call before the first micro-batch of an optimizer step is fetched."""
        self._step_started, self._tokens_before = time.perf_counter(), self.num_tokens

    def fetched(self) -> None:
        """Call when the step's micro-batches have arrived."""
        self._fetched = time.perf_counter()

    def add_tokens(self, num_tokens: int | torch.Tensor) -> None:
        """Count the tokens of one micro-batch on this rank; a tensor stays on its device until it is read."""
        self.num_tokens = self.num_tokens + num_tokens

    def end_step(self) -> None:
        """Call after the optimizer step."""
        self.num_steps += 1
        if self.num_steps > 1:
            self.timed_seconds += time.perf_counter() - self._step_started
            self.data_seconds += self._fetched - self._step_started
            self.timed_tokens = self.timed_tokens + (self.num_tokens - self._tokens_before)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on this rank; `None` before the second step."""
        return float(self.timed_tokens) / self.timed_seconds if self.timed_seconds else None

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
