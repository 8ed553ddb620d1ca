"""Runs a function on gloo ranks that are forked from the test's process, which has already done the imports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

# Models and comparisons are in the scripts that tests/distributed launches.
sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))


def on_ranks(num_ranks: int, function: Callable[[], Any], folder: Path, *, seconds: float = 60.0) -> list[Any]:
    """Each rank's return value, passed through JSON; fails if a rank raised or the ranks do not end in time."""
    children: list[int] = []
    waiting: list[int] = []
    failed, end = False, time.monotonic() + seconds
    try:
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                _be(rank, num_ranks, function, folder)
            children.append(child)
        waiting = list(children)
        while waiting and not failed and time.monotonic() < end:
            for child in list(waiting):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    waiting.remove(child)
                    failed |= status != 0
            time.sleep(0.01)
    finally:  # also when the test is aborted: ranks that wait for each other would stay and keep its output open
        for child in waiting:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    said = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("error*")))
    assert not failed, said
    assert not waiting, said or "the ranks did not end"
    return [json.loads((folder / f"result{rank}").read_text(encoding="utf-8")) for rank in range(num_ranks)]


def _be(rank: int, num_ranks: int, function: Callable[[], Any], folder: Path) -> None:
    status = 1
    try:
        torch.set_num_threads(1)  # the OpenMP threads belong to the parent
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({name: str(value) for name, value in places.items()}, OMP_NUM_THREADS="1")
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # an earlier test in the parent may have run as a single process
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        (folder / f"result{rank}").write_text(json.dumps(function()), encoding="utf-8")
        if dist.is_initialized():  # otherwise the function has already destroyed the group
            dist.barrier()
        status = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        os._exit(status)
