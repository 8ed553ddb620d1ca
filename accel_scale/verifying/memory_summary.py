"""Summary of a rank's memory by kind, with the allocator's table: after the last step, and when memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from accel_scale.ending.out_of_memory import is_out_of_memory
from accel_scale.flags.common import SharedArguments
from accel_scale.measuring.meters import peak_host_bytes
from accel_scale.measuring.profiling import StepProfiler, step_profiler
from accel_scale.measuring.storages import storages
from accel_scale.units import format_bytes
from accel_scale.verifying.measured_memory import quantisation_tensors

FOLDER = "memory"

# The model and its optimizer, once there is one.
Parts = Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer | None]]


class MemorySummary:
    """Writes ``memory/WHEN-rank-N.txt`` below a run's output folder, without allocating on the device.

    Args:
        output_dir: Output folder of the run.
        rank: Rank of this process.
        device: Device that computes.
        parts: Returns what the run trains; called when a summary is written.
    """

    def __init__(self, output_dir: str, *, rank: int, device: torch.device, parts: Parts) -> None:
        self._folder, self._rank, self._device, self._parts = Path(output_dir) / FOLDER, rank, device, parts

    @property
    def is_main(self) -> bool:
        """True if this process writes the files that are written only once."""
        return self._rank == 0

    def write(self, when: str) -> Path:
        """Write a summary for a moment such as ``end`` or ``out-of-memory-step-12``; returns the file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{when}-rank-{self._rank}.txt"
        text = memory_table(*self._parts(), self._device)
        path.write_text(f"{when.replace('-', ' ')}, rank {self._rank}, {self._device}\n\n{text}\n", encoding="utf-8")
        return path


@contextlib.contextmanager
def watched_steps(wanted: SharedArguments, output_dir: str, summary: MemorySummary) -> Iterator[StepProfiler]:
    """Wrap a run's steps for ``--profile_steps`` and ``--memory_summary``; call ``.step()`` after each step.

    If memory runs out inside, the summary is written whether it was requested or not.
    """
    try:
        with step_profiler(wanted.profile_steps, output_dir, is_main=summary.is_main) as profiler:
            yield profiler
    except Exception as error:
        if is_out_of_memory(error):
            summary.write("out-of-memory")
        raise
    if wanted.memory_summary:
        summary.write("end")


def memory_table(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> str:
    """Resident bytes by kind, the host's high-water mark and, on CUDA, the allocator's table."""
    rows = resident_bytes(model, optimizer)
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {format_bytes(size):>12}  {size:>16,} B" for name, size in rows.items()]
    lines.append(f"{'all of these':<{width}}  {format_bytes(sum(rows.values())):>12}  {sum(rows.values()):>16,} B")
    lines += ["", f"host, resident at its highest: {format_bytes(peak_host_bytes())}"]
    if device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(device)]
    else:
        lines += ["", f"The allocator of a {device.type} keeps no table; on CUDA it follows here."]
    return "\n".join(lines)


def resident_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of this rank by kind; shared storage counts once, for the first kind that has it."""
    parameters = list(model.parameters())
    # ZeRO-3 keeps a rank's partition next to an empty parameter.
    parts = [part for p in parameters if isinstance(part := getattr(p, "ds_tensor", None), torch.Tensor)]
    groups = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    states = [] if optimizer is None else tree_leaves(list(optimizer.state.values()))
    kinds: dict[str, Iterable[torch.Tensor]] = {
        "weights": [*parameters, *parts],
        "scales of quantised weights": quantisation_tensors(parameters),
        "buffers": model.buffers(),
        "gradients": [p.grad for p in [*parameters, *groups] if p.grad is not None],
        "optimizer states": [leaf for leaf in states if isinstance(leaf, torch.Tensor)],
        "the optimizer's own weights": groups,
    }
    seen: set[tuple[int, int]] = set()
    found = dict.fromkeys(kinds, 0)
    for kind, tensors in kinds.items():
        for storage in storages(list(tensors)):
            key = (storage.data_ptr(), storage.nbytes())
            if key not in seen:
                seen.add(key)
                found[kind] += storage.nbytes()
    return {kind: size for kind, size in found.items() if size}
