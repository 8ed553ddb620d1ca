"""Runs `torch.profiler` over a few steps of a plain loop, controlled by one flag."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.profiler import profile

_WARM_UP_STEPS = 3


class StepProfiler(Protocol):
    """Interface that the loop notifies at the end of each step."""

    def step(self) -> None: ...


class _NoProfiler:
    def step(self) -> None:
        """Record nothing."""


@contextlib.contextmanager
def step_profiler(num_steps: int, output_dir: str, *, is_main: bool) -> Iterator[StepProfiler]:
    """Record `num_steps` steps after the first three; call ``.step()`` on the yielded object after each step.

    Rank 0 writes ``profile/trace.json`` (for chrome://tracing or Perfetto) and ``profile/operations.txt``, the forty
    operations that took longest, as soon as the steps are done. 0 records nothing and costs nothing.
    """
    if not num_steps or not is_main:
        yield _NoProfiler()
        return
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    folder = Path(output_dir) / "profile"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])

    def write(profiler: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=40)
        (folder / "operations.txt").write_text(table + "\n", encoding="utf-8")

    plan = schedule(wait=max(0, _WARM_UP_STEPS - 1), warmup=1, active=num_steps, repeat=1)
    with profile(
        activities=activities,
        schedule=plan,
        on_trace_ready=write,
        profile_memory=True,
        record_shapes=True,  # also records the dtypes of collectives
    ) as profiler:
        yield profiler
