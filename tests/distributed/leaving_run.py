"""Processes that leave their group right after a collective, with an interpreter that never yields to other threads.

Run by test_leaving.py under torchrun; the argument is ``safely``, or ``at once`` as torch does it.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_scale.ending.leaving import leave_process_group


def main() -> None:
    dist.init_process_group("gloo")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # nor does any thread get a processor of its own
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    sys.setswitchinterval(1000)  # threads wait until the interpreter is released
    dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size())], torch.ones(4))
    if sys.argv[1] == "safely":
        leave_process_group()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("left", flush=True)
