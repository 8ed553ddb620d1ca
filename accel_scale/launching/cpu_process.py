"""Settings that make training on a CPU faster, for the lifetime of the process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# mallopt(3), <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_INT = 2**31 - 1
_OLD_GLIBC_MOST = 2**25  # before 2.36, glibc refuses thresholds above half of an arena's heap
# oneDNN and torch's layer above it each cache compiled code for the last 1,024 shapes multiplied, about 0.5 MiB per
# shape. Rows of one length need about 20 in a transformer; packed rows, whose lengths are multiples, about twice that.
# On the embedded fine-tuning a capacity of 24 was 2 % slower, and its peak 25 MiB lower.
_PRODUCT_CACHES, _KEPT_SHAPES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "40"


def tune_cpu_process() -> None:
    """Tune a process that trains on a CPU; call before torch starts its threads, which inherit the first setting."""
    import torch

    # Gradients and optimizer states of rare tokens are full of denormal numbers, which slow a CPU down.
    torch.set_flush_denormal(True)
    keep_freed_memory()
    for name in _PRODUCT_CACHES:  # read at the first matrix product
        os.environ.setdefault(name, _KEPT_SHAPES)
    if not _multiplies_bf16() and hasattr(torch.library, "get_kernel"):  # torch 2.9 may lack it
        multiply_bf16_in_fp32()


def _multiplies_bf16() -> bool:
    """True if oneDNN has bf16 products for this CPU (AVX-512, Arm's bf16); torch's own loops serve all others."""
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache  # a second call would wrap the first
def multiply_bf16_in_fp32() -> torch.library.Library:
    """Multiply bf16 matrices on this process's CPU in fp32, and round the results to bf16.

    torch's own loops for CPUs without bf16 instructions take more than four times as long (a test checks that on such
    CPUs). The bf16 instructions accumulate in fp32, too. Other dtypes pay some microseconds per product; other devices
    and compiled layers are not affected.

    Returns:
        The library that holds the new kernels; cached for the lifetime of the process.
    """
    import torch

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            own = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, functools.partial(_multiplied, own), "CPU", with_keyset=True)
    return library


def _multiplied(
    own: Callable[..., torch.Tensor], keys: object, *inputs: torch.Tensor, **scales: float
) -> torch.Tensor:
    import torch

    if any(value.dtype is not torch.bfloat16 for value in inputs):
        return own(keys, *inputs, **scales)
    return own(keys, *(value.float() for value in inputs), **scales).bfloat16()


def use_onednn_in_fp32(cpu_info: str | None = None) -> bool:
    """Let oneDNN multiply fp32 matrices on CPUs whose AVX-512 units MKL leaves idle, those not made by Intel.

    Use it for rows of one length, where pretraining becomes 1.6 times as fast (`benchmarks/pretrain_side_by_side.py`):
    oneDNN compiles code for every new shape, and rows of varying length bring one at each step. Call it after
    `tune_cpu_process`, which bounds oneDNN's caches.

    torch gives fp32 products to oneDNN only where they may be rounded to bf16 ("medium"). oneDNN rounds only on CPUs
    with AMX, and computes in fp32 on all others; CPUs with AMX are excluded, and a test product verifies that no digit
    is lost.

    Args:
        cpu_info: Text in the format of ``/proc/cpuinfo``; None: this machine's.

    Returns:
        True if it was done. A precision that the user has chosen is kept.
    """
    import torch

    if cpu_info is None:
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            cpu_info = lines.read()
    words = (cpu_info or "").partition("\n\n")[0].split()
    if "vendor_id" not in words or "GenuineIntel" in words or "avx512f" not in words:
        return False
    is_chosen = torch.get_float32_matmul_precision() != "highest" or "ONEDNN_DEFAULT_FPMATH_MODE" in os.environ
    if is_chosen or any(word.startswith("amx") for word in words):
        return False
    torch.set_float32_matmul_precision("medium")
    # Rounded to bf16, 1 + 2^-12 would be 1.
    ones = torch.full((128, 128), 1 + 2**-12, dtype=torch.float32)
    if torch.equal(ones @ torch.eye(128), ones):
        return True
    torch.set_float32_matmul_precision("highest")
    return False


def use_cores_of_host(num_cores: int, ranks_on_node: int) -> int | None:
    """Use this process's share of the node's cores, for an optimizer that steps in host memory beside an accelerator.

    Launchers give each process one thread, because the accelerator does the work. Adam over weights in host memory is
    bound by the host's bandwidth, which one core of many cannot saturate. DeepSpeed's and torch's kernels share one
    OpenMP runtime, which torch configures for the calling thread, the one that steps.

    Returns:
        Number of threads; None if the user has chosen it.
    """
    if threads_are_chosen():
        return None
    import torch

    threads = max(1, num_cores // max(1, ranks_on_node))
    torch.set_num_threads(threads)
    return threads


def threads_are_chosen(environment: Mapping[str, str] | None = None) -> bool:
    """True if ``OMP_NUM_THREADS`` was set by the user rather than by the launcher.

    `accelerate launch` and torchrun set it for their workers only, so a user's choice is in the launcher's own
    environment or among its flags. Without a readable launcher, a value that is set counts as chosen.

    Args:
        environment: The launcher's environment; None: looked up.
    """
    if environment is None:
        environment = _launcher_environment()
    return "OMP_NUM_THREADS" in (os.environ if environment is None else environment)


def _launcher_environment() -> Mapping[str, str] | None:
    import psutil

    from accel_scale.ending.launcher import launcher_of
    from accel_scale.launching.environment import find_launch_command

    command = find_launch_command()
    if command is not None and "num_cpu_threads_per_process" in command.flags:
        return {"OMP_NUM_THREADS": command.flags["num_cpu_threads_per_process"]}
    launcher = launcher_of(os.getpid())
    if launcher is None:
        return None
    with contextlib.suppress(psutil.Error):
        return psutil.Process(launcher).environ()
    return None


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Let glibc keep the memory freed by tensors, for the tensors of the next step.

    By default it returns allocations above 32 MiB, and free memory at the end of the heap, to the kernel, which zeroes
    each page of the next step's tensors as they are touched. The peak does not change, and up to 2 GiB that a step
    does not use stay with the process.

    Args:
        environment: Environment in which to look for a user's own malloc settings; None: the process's.

    Returns:
        True if it was done: not with another C library, or if the user has their own settings or allocator.
    """
    environment = os.environ if environment is None else environment
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in environment):
        return False
    with contextlib.suppress(OSError, AttributeError, TypeError):  # macOS, musl, Windows
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # only glibc has it
        is_set = any(library.mallopt(_M_MMAP_THRESHOLD, most) for most in (_LARGEST_INT, _OLD_GLIBC_MOST))
        # Every arena keeps its own freed memory, so few of them hold less.
        library.mallopt(_M_ARENA_MAX, 2)
        return bool(is_set and library.mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
    return False
