"""Process groups on this machine: the launch's own, or new processes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_scale.ending.leaving import leave_process_group
from accel_scale.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """The place of a process in its group.

    Attributes:
        rank, world_size, local_rank, local_world_size: As in torchrun's variables.
        backend: ``gloo`` or ``nccl``.
        device: The `torch.device` of its tensors.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    backend: str
    device: Any


def launched_processes() -> int:
    """Number of processes that torchrun or `accelerate launch` started, including this one; 0 if neither did."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 0


def choose_backend(asked: str | None, local_processes: int) -> str:
    """``nccl`` if every process has its own GPU, else ``gloo``.

    Raises:
        ConfigError: if NCCL is asked for but there are too few GPUs.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "nccl" and gpus < local_processes:
        raise ConfigError(
            f"NCCL needs a GPU for each process: {local_processes} processes, {gpus} GPUs.",
            place="--backend",
            fix="use --backend gloo, or fewer processes.",
        )
    return asked or ("nccl" if gpus >= local_processes > 0 else "gloo")


def join_launch(asked_backend: str | None) -> Place:
    """Create the process group of the launch that this process is part of."""
    world = int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    backend = choose_backend(asked_backend, local_world)
    return _join(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", "0")), local_world, backend)


def run_locally(work: Callable[..., Any], num_processes: int, asked_backend: str | None, *args: object) -> object:
    """Start `num_processes` here and run ``work(place, *args)`` in each.

    Args:
        work: Must be importable by name. Its result on rank 0 must fit into JSON.
        asked_backend: ``gloo``, ``nccl``, or None for the best available.

    Returns:
        The result of rank 0.

    Raises:
        ConfigError: as raised by `work` on rank 0.
    """
    import torch.multiprocessing as processes

    backend = choose_backend(asked_backend, num_processes)
    is_asked = "OMP_NUM_THREADS" in os.environ
    with tempfile.TemporaryDirectory(prefix="accel-scale-") as folder:
        answer = Path(folder) / "answer.json"
        try:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            processes.spawn(_process, (num_processes, backend, folder, work, args), nprocs=num_processes)
        finally:
            if not is_asked:
                os.environ.pop("OMP_NUM_THREADS", None)
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise ConfigError(**found["error"])
    return found["answer"]


def progress_bar(place: Place, total: int, description: str) -> Any:
    """A tqdm bar, drawn by rank 0 only, and only in a terminal."""
    import sys

    from tqdm import tqdm

    is_shown = place.rank == 0 and sys.stderr.isatty()
    # Drawn rarely: it shares the processor with the code being timed.
    return tqdm(total=total, desc=description, disable=not is_shown, mininterval=0.5, leave=False, dynamic_ncols=True)


def _process(
    rank: int, world: int, backend: str, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """One process of `run_locally`; it ends when its parent does, in whatever way."""
    from accel_scale.quiet import quiet_imports

    quiet_imports()  # before the libraries that would print at import

    _die_with_parent()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    place = _join(rank, world, rank, world, backend, store=f"file://{folder}/store")
    try:
        found: dict[str, Any] = {"answer": work(place, *args)}
    except ConfigError as error:  # the same on all ranks
        found = {"error": {"problem": error.problem, "place": error.place, "fix": error.fix}}
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(found), encoding="utf-8")
    leave_process_group()


def _die_with_parent() -> None:
    """Replace torch's SIGINT, which a process that waits for others in C++ never sees."""
    import ctypes
    import signal
    import sys

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def _join(rank: int, world: int, local_rank: int, local_world: int, backend: str, *, store: str = "env://") -> Place:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # about new names of collectives, which older torch lacks
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store, rank=rank, world_size=world, device_id=device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        dist.init_process_group("gloo", store, rank=rank, world_size=world)
    return Place(rank, world, local_rank, local_world, backend, device)
