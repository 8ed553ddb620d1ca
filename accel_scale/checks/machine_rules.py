"""Rules on the machine: its system, and the links between its GPUs."""

from __future__ import annotations

from accel_scale.checks.case import Case, Finding, Rule, error, warning
from accel_scale.errors import ConfigError
from accel_scale.launching.gpu_links import pairs_without_nvlink
from accel_scale.launching.machine import refuse_native_windows

_NAMED_PAIRS = 4


def native_windows(case: Case) -> Finding | None:
    """Native Windows, as opposed to WSL2."""
    try:
        refuse_native_windows(case.machine.system)
    except ConfigError as refusal:
        return error(refusal.place or "", refusal.problem, refusal.fix or "")
    return None


def tensor_parallelism_without_nvlink(case: Case) -> Finding | None:
    """Tensor parallelism over PCIe: its ranks exchange activations four times per block, and wait for them."""
    links, local = case.machine.gpu_links, case.launch.local_world_size or 1
    size = max(case.parallel.tensor_parallel_size, case.run.tp_size or 1)
    if size == 1 or case.device.type != "cuda" or not case.run.shares_model:
        return None
    ranks = min(local, len(links))
    slow = _slow_pairs(case, ranks, size)
    if not slow:
        return None
    kinds = " and ".join(sorted({links[a][b] for a, b in slow}))
    pairs = ", ".join(f"{a}-{b}" for a, b in slow[:_NAMED_PAIRS])
    more = f" and {len(slow) - _NAMED_PAIRS} more pairs" if len(slow) > _NAMED_PAIRS else ""
    smaller = next((n for n in range(size // 2, 1, -1) if size % n == 0 and not _slow_pairs(case, ranks, n)), None)
    use = f"use groups of {smaller}, which NVLink joins, or" if smaller else "use"
    place = "parallelism_config.parallelism_config_tp_size"
    return warning(
        case.run.place("tp_size") if case.run.tp_size else case.launch.place(place),
        f"the GPUs of ranks {pairs}{more} are joined by {kinds}, not NVLink: tensor parallelism exchanges activations "
        "four times per block, and each matrix product waits for it.",
        f"{use} accelerate_configs/fsdp2.yaml, which sends weights while it computes, or stages (--pp_size), which "
        "send least.",
    )


def _slow_pairs(case: Case, ranks: int, size: int) -> list[tuple[int, int]]:
    """Pairs without NVLink in all tensor-parallel groups of this node, which are neighbours in rank."""
    groups = [range(first, min(first + size, ranks)) for first in range(0, ranks, size)]
    return [pair for group in groups for pair in pairs_without_nvlink(case.machine.gpu_links, group)]


MACHINE_RULES: tuple[Rule, ...] = (native_windows, tensor_parallelism_without_nvlink)
