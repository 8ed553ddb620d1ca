"""What this machine has: devices, installed packages, compilers, disk."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accel_scale.launching.build_locks import stale_build_locks

# Distribution names; versions come from their metadata, nothing is imported.
PACKAGES = (
    "accel-scale", "torch", "accelerate", "transformers", "trl", "peft", "datasets", "bitsandbytes", "deepspeed",
    "torchao", "flash-attn", "flash-attn-3", "kernels", "transformer-engine", "liger-kernel", "ninja", "wandb",
)  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """A folder that a run would write to.

    Attributes:
        writable: Whether files can be created there, or the folder itself can.
        free_bytes: Free space of its file system.
    """

    writable: bool
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """What the checks need to know about a machine. The defaults are a bare CPU machine with nothing installed.

    Attributes:
        device: ``cuda``, ``xpu``, ``mps`` … or ``cpu``.
        num_devices: Visible accelerators.
        capability: CUDA compute capability, e.g. (9, 0).
        native_bf16: Whether it is also faster than fp32; CPUs without instructions of their own emulate it, slowly.
        packages: Installed distribution → version.
        has_compiler, has_ninja, has_libaio: What DeepSpeed needs to compile its CPU Adam and asynchronous I/O.
        folders: Facts on the folders asked about, by the name they were asked with.
        stale_locks: Locks of extension builds that were killed.
    """

    device: str = "cpu"
    device_name: str = "CPU"
    num_devices: int = 0
    device_memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    supports_bf16: bool = True
    native_bf16: bool = True
    supports_fp8: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    has_compiler: bool = False
    has_ninja: bool = False
    has_libaio: bool = False
    num_cores: int = 1
    host_memory_bytes: int = 0
    python_version: str = ""
    system: str = ""
    folders: Mapping[str, Folder] = field(default_factory=dict)
    stale_locks: tuple[str, ...] = ()

    def has(self, package: str) -> bool:
        """Whether `package` (a distribution name) is installed."""
        return package in self.packages


def detect_machine(folders: Iterable[str | Path] = ()) -> Machine:
    """This machine, and whether each of `folders` could be written to. Imports torch."""
    import psutil

    packages = installed_packages()
    return Machine(
        **(_detect_device() if "torch" in packages else {}),
        packages=packages,
        has_compiler=shutil.which(os.environ.get("CXX", "c++")) is not None,
        has_ninja=_has_ninja(),
        has_libaio=_has_libaio(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host_memory_bytes=psutil.virtual_memory().total,
        python_version=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        folders={str(name): describe_folder(Path(name)) for name in folders},
        stale_locks=stale_build_locks(),
    )


def installed_packages() -> dict[str, str]:
    """Version of each of `PACKAGES` that is installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_folder(path: Path) -> Folder:
    """Whether `path` (or, where it does not exist yet, its nearest parent) can be written to, and the space left."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return Folder(writable, shutil.disk_usage(existing).free)


def _detect_device() -> dict:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {"device_name": platform.processor() or platform.machine(), "native_bf16": _cpu_has_bf16()}
    if accelerator.type != "cuda":
        return {
            "device": accelerator.type,
            "device_name": accelerator.type,
            "num_devices": torch.accelerator.device_count(),
        }
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    return {
        "device": "cuda",
        "device_name": properties.name,
        "num_devices": torch.cuda.device_count(),
        "device_memory_bytes": properties.total_memory,
        "capability": capability,
        "supports_bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        # Ada (8.9) and Hopper (9.0) are the first with fp8 tensor cores.
        "supports_fp8": capability >= (8, 9),
    }


def _cpu_has_bf16() -> bool:
    """Whether bf16 products are faster than fp32 ones (names of `torch.cpu.get_capabilities`, torch 2.13).

    x86: AMX, or AVX-512 BF16 on processors that are not Intel's. Intel's have AMX for it, which virtual machines may
    hide; their AVX-512 instructions alone were half as fast as fp32 (Emerald Rapids: 147 against 270 GFLOP/s on two
    cores). Arm: the bf16 extension.
    """
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if "intel" in str(capabilities.get("cpu_name", "")).lower():
        return bool(capabilities.get("amx_bf16"))
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def _has_ninja() -> bool:
    """Where `torch.utils.cpp_extension` looks: the PATH; an environment's own bin folder may not be on it."""
    return shutil.which("ninja") is not None


def _has_libaio() -> bool:
    prefixes = {"/usr", "/usr/local", sys.prefix, os.environ.get("CONDA_PREFIX", "/usr")}
    folders = [Path(p, "include") for p in prefixes]
    folders += [Path(p) for name in ("CPATH", "CPLUS_INCLUDE_PATH") for p in os.environ.get(name, "").split(":") if p]
    folders += [Path(flag[2:]) for flag in os.environ.get("CFLAGS", "").split() if flag.startswith("-I")]
    return any((folder / "libaio.h").is_file() for folder in folders)
