"""Two gloo ranks, one of which stops somewhere; prints the ranks' output and exit statuses per scenario as JSON.

    python tests/distributed/hang_run.py

The ranks are forked and train a small model under DDP in a loop with accel-scale's watch and a patience of 5 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_scale.ending.leaving import leave_process_group

TIMEOUT_SECONDS = 5.0
STOP_AT = 3


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def sleep_in_data(rank: int, step: int, model: Any) -> None:
    """A data loader that never returns."""
    if rank == 1 and step == STOP_AT:
        time.sleep(3600)


def loop_in_backward(rank: int, step: int, model: Any) -> None:
    """A gradient that takes forever: the rank has not begun the step's all_reduce."""
    if rank == 1 and step == STOP_AT:
        model.module[0].weight.register_hook(lambda grad: time.sleep(3600))


def stop_rank_1(rank: int, step: int, model: Any) -> None:
    """The whole process is stopped, including its watch."""
    if rank == 1 and step == STOP_AT:
        time.sleep(2.5)  # so that the last beat reports this step
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_rank_0(rank: int, step: int, model: Any) -> None:
    """The same for the rank that hosts the store."""
    if rank == 0 and step == STOP_AT:
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGSTOP)


def nobody(rank: int, step: int, model: Any) -> None:
    """Slow but alive: rank 1 exceeds the patience in total, but not at any one time."""
    if rank == 1:
        time.sleep(1.5)


SCENARIOS: dict[str, Callable[[int, int, Any], None]] = {
    f.__name__: f for f in (sleep_in_data, loop_in_backward, stop_rank_1, stop_rank_0, nobody)
}


def rank_main(scenario: str, rank: int, port: int) -> None:
    """One rank's training."""
    import torch
    import torch.distributed as dist

    from accel_scale.training.resilience.hang_watch import HangWatch, follow_steps

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    watch = HangWatch("train.py", TIMEOUT_SECONDS).start()
    position = {"step": 1}
    follow_steps(lambda: position["step"])
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = batches_of(scenario, rank, model, position)
    for _ in range(6):
        batch = next(batches)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        position["step"] += 1
    watch.close()
    leave_process_group()


def child_main(scenario: str, rank: int, port: int, log: str) -> int:
    """Run a forked rank, from its first line of output to its exit status."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        rank_main(scenario, rank, port)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as the interpreter would
        return 1
    return 0


def batches_of(scenario: str, rank: int, model: Any, position: dict[str, int]) -> Iterator[Any]:
    """Random batches; the scenario takes effect before a batch is returned."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Rows(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            while True:
                SCENARIOS[scenario](rank, position["step"], model)
                yield torch.randn(8)

    return iter(DataLoader(Rows(), batch_size=1))


def main() -> None:
    """Fork all scenarios at once, wait, kill the stopped processes, print."""
    import torch._dynamo  # before the forks, which then share what DDP would import in each of them
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401
    from torch.optim import SGD  # noqa: F401
    from torch.utils.data import DataLoader  # noqa: F401

    import accel_scale.training.resilience.hang_watch  # noqa: F401

    assert torch.distributed.is_available()

    children: dict[int, tuple[str, int]] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for scenario in SCENARIOS:
            port = free_port()
            for rank in range(2):
                child = os.fork()
                if child == 0:
                    os._exit(child_main(scenario, rank, port, f"{folder}/{scenario}_{rank}"))
                children[child] = (scenario, rank)
        results: dict[str, Any] = {name: {"status": [None, None], "seconds": [None, None]} for name in SCENARIOS}
        deadline = started + 200
        while children and time.monotonic() < deadline:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child in children:
                scenario, rank = children.pop(child)
                results[scenario]["status"][rank] = os.waitstatus_to_exitcode(status)
                results[scenario]["seconds"][rank] = time.monotonic() - started
            left = {name for name, _ in children.values()}
            if all(name.startswith("stop_") and None in results[name]["status"] for name in left) and all(
                sum(s is not None for s in results[name]["status"]) == 1 for name in left
            ):
                break  # only stopped ranks are left
            time.sleep(0.05)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        for name in SCENARIOS:
            results[name]["said"] = [Path(f"{folder}/{name}_{rank}").read_text() for rank in range(2)]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
