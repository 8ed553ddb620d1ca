"""Leave process groups without waiting forever and without being aborted."""

from __future__ import annotations

import functools
import time
from pathlib import Path

# Gloo's threads must be seen asleep this many times in a row: on a busy machine, a runnable one may wait for long.
_TIMES_ASLEEP, _LOOK_SECONDS = 5, 0.02
_LONGEST_SECONDS = 10.0
# For systems that do not show the state of threads: a runnable one gets a processor within a fraction of this time.
_LETTING_GO_SECONDS = 0.25


def let_go_of_collectives() -> None:
    """Call between the last collective and the end of a process, while models and groups still exist.

    A gloo thread frees the tensors of a collective after the collective is over, and needs the interpreter for it. If
    the process ends meanwhile, torch 2.13 waits forever (the last owner of a group, such as DDP, joins the thread
    while holding the interpreter) or aborts (the interpreter ends the thread in the middle of a destructor).
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        time.sleep(_LETTING_GO_SECONDS)
        return
    deadline, times_asleep = time.monotonic() + _LONGEST_SECONDS, 0
    while times_asleep < _TIMES_ASLEEP and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)  # releases the interpreter
        times_asleep = times_asleep + 1 if _gloo_is_asleep(tasks) else 0


def _gloo_is_asleep(tasks: Path) -> bool:
    """True if none of gloo's threads runs or waits for a processor; ``stat`` is described in proc(5)."""
    for task in tasks.iterdir():
        try:
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if name.startswith("pt_gloo") and fields.split()[0] != "S":
            return False
    return True


def leave_process_group() -> None:
    """`torch.distributed.destroy_process_group`, made safe after the last collective."""
    import torch.distributed as dist

    let_go_of_collectives()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leave_groups_safely() -> None:
    """Make every later `torch.distributed.destroy_process_group` of this process safe; calling this twice is fine."""
    import torch.distributed as dist

    destroy = dist.destroy_process_group
    if getattr(destroy, "is_safe", False):
        return

    @functools.wraps(destroy)
    def destroy_safely(group: dist.ProcessGroup | None = None) -> None:
        let_go_of_collectives()
        destroy(group)

    destroy_safely.is_safe = True  # type: ignore[attr-defined]
    dist.destroy_process_group = destroy_safely
