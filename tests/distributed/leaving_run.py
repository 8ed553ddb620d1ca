"""Processes that leave their group right after a collective, on an interpreter that gives way to no thread.

Run by test_leaving.py under torchrun; the argument is ``safely``, or ``at once`` as torch has it.
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
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # nor a processor to themselves
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    sys.setswitchinterval(1000)  # threads wait until the interpreter is given away
    dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size())], torch.ones(4))
    if sys.argv[1] == "safely":
        leave_process_group()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("left", flush=True)
