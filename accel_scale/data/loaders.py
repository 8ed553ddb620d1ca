"""Data loader settings from the machine: worker processes, pinned memory, prefetching."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

# More workers per rank do not deliver tokenised rows faster; they only take memory.
MAX_WORKERS = 8
# For fewer rows in memory-mapped files, used on a CPU, starting workers costs more than it gains.
SMALL_NUM_ROWS = 100_000
_outliving_pid = 0


def loader_settings(
    *,
    device_type: str,
    num_rows: int | None,
    processes_on_node: int = 1,
    num_cores: int | None = None,
    num_shards: int | None = None,
    explicit: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`TrainingArguments` values for the data loader; what the user set is kept and the rest follows from it.

    Args:
        device_type: ``cuda``, ``xpu``, …, or ``cpu``.
        num_rows: Rows of the data set; None for a stream, whose rows are read and tokenised by the loader itself.
        processes_on_node: Ranks that share this machine's cores.
        num_cores: Cores this process may use on the machine; None asks the operating system.
        num_shards: Shards of a stream: more workers than that would idle.
        explicit: ``dataloader_*`` values that the user set: never changed, and left out of the result.

    Returns:
        Those of `dataloader_num_workers`, `dataloader_pin_memory`, `dataloader_prefetch_factor` and
        `dataloader_persistent_workers` that the user did not set.
    """
    explicit = dict(explicit or {})
    accelerated = device_type not in ("cpu", "mps")
    num_workers = explicit.get("dataloader_num_workers")
    if num_workers is None:
        num_workers = _num_workers(device_type, num_rows, processes_on_node, num_cores or available_cores())
        if num_shards is not None:
            num_workers = min(num_workers, num_shards)
    settings: dict[str, Any] = {
        "dataloader_num_workers": num_workers,
        "dataloader_pin_memory": accelerated,
        # torch refuses both without workers.
        "dataloader_prefetch_factor": 2 if num_workers else None,
        "dataloader_persistent_workers": num_workers > 0,
    }
    return {name: value for name, value in settings.items() if name not in explicit}


def _num_workers(device_type: str, num_rows: int | None, processes_on_node: int, num_cores: int) -> int:
    """Up to 8 workers per rank, as far as there are cores; one core is left to each rank itself."""
    cores_per_rank = num_cores // max(1, processes_on_node)
    if device_type == "cpu" and num_rows is not None and num_rows < SMALL_NUM_ROWS:
        return 0
    if device_type == "cpu":
        # The model computes on these cores too.
        return 1 if cores_per_rank > 1 else 0
    return max(0, min(MAX_WORKERS, cores_per_rank - 1))


def available_cores() -> int:
    """Cores this process may run on: its affinity mask, which container managers set, else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def outlive_signals(worker: int = 0) -> None:
    """Keep a worker process alive when a launcher, scheduler or terminal signals the run's whole process group.

    The run saves first and then ends its workers: SIGTERM is obeyed only from the run's own process; SIGINT and
    SIGUSR1 are ignored.
    """
    global _outliving_pid
    if _outliving_pid == os.getpid():
        return
    _outliving_pid = os.getpid()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before the thread, which inherits it
        threading.Thread(target=_end_with_owner, args=(os.getppid(),), daemon=True).start()


def _end_with_owner(owner: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid not in (owner, os.getpid()):
        pass
    os._exit(0)
