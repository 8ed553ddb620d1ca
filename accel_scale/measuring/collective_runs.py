"""Run and time collectives on the processes of a launch: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.launching.local_processes import progress_bar
from accel_scale.network.link_fit import Sample

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

DEFAULT_REPEATS = 300
# Share of the repeats (the fastest) that are averaged, see `Sample.seconds`.
FASTEST_SHARE = 0.25
# Calls are timed in batches, so that the clock and the barrier before them do not count. All small sizes use the same
# number of calls per batch, since the next call of a rooted operation begins before the last has ended everywhere.
CALLS, BATCH_SECONDS = 8, 0.02
# Approximate time for all repeats of one size.
MOST_SECONDS = 1.0
LEAST_REPEATS = 10
WARM_UP = 3


@dataclass(frozen=True)
class Level:
    """A group of ranks measured together.

    Attributes:
        name: ``inside`` a server or ``between`` servers.
        group: This rank's process group; None for all ranks.
        ranks: Ranks of the group, in order.
        rank: This process's index among them.
        sharing: Groups of this level that share one server's network, all measured at once.
    """

    name: str
    group: ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    sharing: int = 1

    @property
    def workers(self) -> int:
        return len(self.ranks)


def make_levels(rank: int, world_size: int, local_world_size: int) -> list[Level]:
    """One level for a single server or one process per server, else two. Collective.

    Raises:
        ConfigError: for a single process, or servers with different numbers of processes.
    """
    import torch.distributed as dist

    if world_size == 1:
        raise ConfigError("one process sends nothing.", place="--processes", fix="use 2 or more.")
    if world_size % local_world_size:
        raise ConfigError(
            f"{world_size} processes are not {local_world_size} on every server.",
            place="launch",
            fix="start as many on each.",
        )
    nodes = world_size // local_world_size
    everyone = tuple(range(world_size))
    if nodes == 1 or local_world_size == 1:
        return [Level("inside" if nodes == 1 else "between", None, everyone, rank)]
    levels = []
    node, local = divmod(rank, local_world_size)
    for other in range(nodes):
        ranks = everyone[other * local_world_size : (other + 1) * local_world_size]
        group = dist.new_group(list(ranks))
        if other == node:
            levels.append(Level("inside", group, ranks, local))
    for other in range(local_world_size):
        ranks = everyone[other::local_world_size]
        group = dist.new_group(list(ranks))
        if other == local:
            levels.append(Level("between", group, ranks, node, sharing=local_world_size))
    return levels


def measure_op(
    op: str,
    sizes: Sequence[int],
    level: Level,
    device: Any,
    *,
    repeats: int = DEFAULT_REPEATS,
    after_round: Callable[[], Any] = lambda: None,
) -> list[Sample]:
    """Times of `op` for each of `sizes`, the same on every rank; collective over all ranks.

    The result of every size is checked once, and it is run `WARM_UP` times. Then batches of calls are timed, each from
    a barrier to the end on the slowest rank, in rounds over all sizes, so that a disturbance of a second or two hits a
    few repeats of every size rather than all repeats of one.

    Args:
        op: One of `collectives.OPS`.
        sizes: K in bytes, rounded down to whole fp32 values for every worker.
        level: A level from `make_levels`.
        device: Device of the tensors.
        repeats: Batches of each size; large messages, which are slow and hardly vary, use fewer.
        after_round: Called `repeats` times, between timings.
    """
    unit = 4 * level.workers
    calls = [make_call(op, max(1, size // unit) * unit, level, device) for size in sizes]
    for call in calls:
        if not call.is_right():
            raise RuntimeError(f"{op} of {call.num_bytes} bytes gave a wrong result on rank {level.ranks[level.rank]}")
    plans = [_plan(estimate, repeats) for estimate in _estimates(calls, device)]
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        for call, (batch, count), found in zip(calls, plans, times, strict=True):
            # Spread `count` turns evenly over all repeats.
            if (turn + 1) * count // repeats > turn * count // repeats:
                found.append(_timed(call.run, batch, device))
        after_round()
    slowest = [sorted(_slowest(found, device)) for found in times]
    return [
        Sample(op, call.num_bytes, level.workers, mean_of_fastest(found), _median(found))
        for call, found in zip(calls, slowest, strict=True)
    ]


def _estimates(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Approximate time of each call, with smaller sizes capped at the time of larger ones to limit disturbances."""
    tries = []
    for call in calls:
        for _ in range(WARM_UP):
            _timed(call.run, 1, device)
        tries.append(min(_timed(call.run, 3, device) for _ in range(5)))
    seconds, least = _slowest(tries, device), math.inf
    by_size = sorted(range(len(calls)), key=lambda index: -calls[index].num_bytes)
    for index in by_size:
        seconds[index] = least = min(least, seconds[index])
    return seconds


def _plan(estimate: float, repeats: int) -> tuple[int, int]:
    """Calls per batch, and number of batches."""
    batch = min(CALLS, max(1, int(BATCH_SECONDS / estimate)))
    return batch, max(LEAST_REPEATS, min(repeats, round(MOST_SECONDS / (batch * estimate))))


def mean_of_fastest(ordered: Sequence[float]) -> float:
    """Mean of the fastest `FASTEST_SHARE` of sorted times, at least one."""
    count = max(1, round(FASTEST_SHARE * len(ordered)))
    return sum(ordered[:count]) / count


def _median(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _timed(run: Callable[[], None], calls: int, device: torch.device) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / calls


def _slowest(seconds: list[float], device: torch.device) -> list[float]:
    import torch
    import torch.distributed as dist

    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


@dataclass(frozen=True)
class Call:
    """A collective with its tensors.

    Attributes:
        num_bytes: Message size K.
        run: Runs it once and waits for it.
        is_right: Runs it once on known values and returns whether this rank's result is correct.
    """

    num_bytes: int
    run: Callable[[], None]
    is_right: Callable[[], bool]


def make_call(op: str, num_bytes: int, level: Level, device: torch.device) -> Call:
    """`op` on fp32 tensors of K = `num_bytes`, a multiple of 4 × workers. Rank r starts with the value r + 1."""
    import torch
    import torch.distributed as dist

    n, mine, group, root = level.workers, level.rank, level.group, level.ranks[0]
    whole, part = num_bytes // 4, num_bytes // 4 // n
    total, ranks = n * (n + 1) / 2, torch.arange(1.0, n + 1, device=device)
    # Buffers of both sides. Writing zeros makes sure that the memory is really allocated, not just reserved.
    big = torch.empty(whole, device=device).fill_(0)
    small = torch.empty(part, device=device).fill_(0)
    pieces = list(big.split(part)) if mine == 0 else None
    received = torch.empty_like(big).fill_(0) if op in ("all_to_all", "point_to_point") else big
    after, before = level.ranks[(mine + 1) % n], level.ranks[(mine - 1) % n]

    def exchange() -> None:
        sends = [dist.P2POp(dist.isend, big, after, group), dist.P2POp(dist.irecv, received, before, group)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    # For each op: function, input, output, and expected result (one value, or one for each part).
    table: dict[str, tuple[Callable[[], Any], Any, Any, Any]] = {
        "broadcast": (lambda: dist.broadcast(big, root, group), big, big, 1.0),
        "reduce": (lambda: dist.reduce(big, root, group=group), big, big if mine == 0 else None, total),
        "all_reduce": (lambda: dist.all_reduce(big, group=group), big, big, total),
        "all_gather": (lambda: dist.all_gather_into_tensor(big, small, group), small, big, ranks),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(small, big, group=group), big, small, total),
        "scatter": (lambda: dist.scatter(small, pieces, root, group), None, small, mine + 1.0),
        "gather": (lambda: dist.gather(small, pieces, root, group), small, big if mine == 0 else None, ranks),
        "all_to_all": (lambda: dist.all_to_all_single(received, big, group=group), None, received, mine + 1.0),
        "point_to_point": (exchange, big, received, float((mine - 1) % n + 1)),
    }
    run, given, result, expected = table[op]

    def is_right() -> bool:
        if given is None:  # part i is for rank i
            big.copy_(ranks.repeat_interleave(part))
        else:
            given.fill_(mine + 1.0)
        run()
        if result is None:
            right = True
        elif isinstance(expected, float):
            right = bool((result == expected).all())
        else:
            right = bool((result == expected.repeat_interleave(part)).all())
        for tensor in (big, small, received):
            tensor.fill_(0)
        return right

    return Call(num_bytes, run, is_right)


def measure_levels(place: Any, ops: Sequence[str], sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure every operation at every size on every level of a launch; collective.

    Args:
        place: A `local_processes.Place`.

    Returns:
        Plain values: ``device``, ``versions``, and ``levels``: name, sharing and samples of each.
    """
    import torch

    levels = make_levels(place.rank, place.world_size, place.local_world_size)
    found = []
    with progress_bar(place, len(levels) * len(ops) * repeats, "measuring") as bar:
        for level in levels:
            samples: list[dict[str, Any]] = []
            for op in ops:
                bar.set_description(f"{op} {level.name}")
                measured = measure_op(op, sizes, level, place.device, repeats=repeats, after_round=bar.update)
                samples += map(asdict, measured)
            found.append({"name": level.name, "sharing": level.sharing, "samples": samples})
    is_gpu = place.device.type == "cuda"
    versions = {"torch": str(torch.__version__)}
    if is_gpu:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    device = torch.cuda.get_device_name(place.device) if is_gpu else processor_name()
    return {"backend": place.backend, "device": device, "versions": versions, "levels": found}


def processor_name() -> str:
    """Processor name from /proc/cpuinfo, with the number of cores this process may use."""
    import os
    import platform
    import re
    from pathlib import Path

    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    name = match.group(1).strip() if match else platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"
