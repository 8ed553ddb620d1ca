"""Leave process groups without waiting forever and without being aborted."""

from __future__ import annotations

import time

# A thread that can run is given a processor within a small part of this.
_LETTING_GO_SECONDS = 0.25


def let_go_of_collectives() -> None:
    """Call between the last collective and the end of a process, while models and groups are still there.

    A thread of gloo's frees the tensors of a collective after the collective is over, and needs the interpreter for
    it. Where the process ends meanwhile, torch 2.13 waits for ever (the last owner of a group, such as DDP, joins the
    thread while it holds the interpreter) or aborts (the interpreter ends the thread in the midst of a destructor).
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        time.sleep(_LETTING_GO_SECONDS)


def leave_process_group() -> None:
    """`torch.distributed.destroy_process_group`, safely after the last collective."""
    import torch.distributed as dist

    let_go_of_collectives()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
