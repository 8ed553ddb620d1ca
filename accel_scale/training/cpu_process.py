"""Settings of a process that make training on a CPU faster; they hold for the process's life."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping

# mallopt(3), <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1
_OLD_GLIBC_MOST = 2**25  # before 2.36, glibc refuses thresholds above half of an arena's heap


def tune_cpu_process() -> None:
    """For a process that trains on a CPU; call it before torch starts its threads, which inherit the first setting."""
    import torch

    # Gradients and optimizer states of rare tokens are full of denormal numbers, which slow a CPU down.
    torch.set_flush_denormal(True)
    keep_freed_memory()


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Let glibc keep the memory that tensors leave, for the tensors of the next step.

    By default it hands allocations above 32 MiB, and what is free at the heap's end, back to the kernel, which
    zeroes each page of the next step's tensors as they are touched. The peak stays what it is, and up to 2 GiB that a
    step does not use stay with the process.

    Args:
        environment: Where a user's own settings of malloc are looked for; None: the process's.

    Returns:
        Whether it was done: not with another C library, nor where the user has settings or an allocator of his own.
    """
    environment = os.environ if environment is None else environment
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in environment):
        return False
    with contextlib.suppress(OSError, AttributeError, TypeError):  # macOS, musl, Windows
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # glibc alone has it
        is_set = any(library.mallopt(_M_MMAP_THRESHOLD, most) for most in (_LARGEST_INT, _OLD_GLIBC_MOST))
        return bool(is_set and library.mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
    return False
