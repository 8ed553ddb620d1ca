"""Breakdown of a setting's memory and time on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.planning.cost.overheads import gpu_overhead
from accel_scale.planning.search.plan import Candidate
from accel_scale.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GIB = 2**30


def print_terms(console: Console, candidate: Candidate) -> None:
    """Print memory by phase, the overheads on a card, and where the time of a step goes."""
    from rich.table import Table

    memory = candidate.memory
    table = Table(title=f"\n{candidate.choice.label}: GiB on each GPU", title_justify="left", pad_edge=False)
    table.add_column("")
    for phase in memory.phases:
        table.add_column(phase.name, justify="right", style="bold" if phase is memory.peak_phase else None)
    names = dict.fromkeys(name for phase in memory.phases for name, value in phase.terms if value)
    for name in names:
        sizes = [dict(phase.terms).get(name, 0.0) for phase in memory.phases]
        table.add_row(name, *(f"{size / _GIB:.2f}" if size else "" for size in sizes))
    table.add_section()
    table.add_row("in tensors", *(f"{phase.total_bytes / _GIB:.2f}" for phase in memory.phases))
    console.print(table)
    console.print(_side_by_side("peak on each GPU", gpu_rows(candidate), "{:.2f} GiB", _GIB))
    console.print(f"host memory of a rank, at most: {format_bytes(memory.host_bytes)}")
    if candidate.time is not None:
        console.print(_side_by_side("one optimizer step", _time_rows(candidate), "{:.3f} s", 1))


def _side_by_side(title: str, rows: dict[str, float], text: str, unit: float) -> Table:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, text.format(value / unit))
    return table


def gpu_rows(candidate: Candidate) -> dict[str, float]:
    """Bytes on each GPU at the peak, by kind."""
    memory, overhead = candidate.memory, gpu_overhead(candidate.setup)
    return {
        f"in tensors ({memory.peak_phase.name})": memory.peak_bytes,
        "+ lost by the allocator": memory.reserved_bytes - memory.hoarded_bytes - memory.peak_bytes,
        **({"+ kept, but given back when full": memory.hoarded_bytes} if memory.hoarded_bytes else {}),
        "+ CUDA context": overhead.context_bytes,
        "+ NCCL": overhead.communication_bytes,
        "= on the card": memory.device_bytes,
        "lower end": memory.low_bytes,
        "upper end, which must fit": memory.high_bytes,
    }


def _time_rows(candidate: Candidate) -> dict[str, float]:
    time = candidate.time
    assert time is not None
    return {
        "matrix products and attention": time.matmul_seconds,
        "memory traffic": time.memory_seconds,
        "waiting for kernel launches": time.launch_wait_seconds,
        "pipeline stages that wait": time.bubble_seconds,
        "communication that shows": time.exposed_communication_seconds,
        "optimizer": time.optimizer_seconds,
        "offload": time.offload_seconds,
        **({"writing answers": time.generation_seconds} if time.generation_seconds else {}),
        "step": time.step_seconds,
        "lower end": time.low_seconds,
        "upper end": time.high_seconds,
    }
