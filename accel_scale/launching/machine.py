"""Detect what this machine has: devices, installed packages, compilers, disk."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device
from accel_scale.launching.build_locks import stale_build_locks, unheld_build_locks

# Distribution names; versions are read from metadata, without importing anything.
PACKAGES = (
    "accel-scale", "torch", "accelerate", "transformers", "trl", "peft", "datasets", "bitsandbytes", "deepspeed",
    "torchao", "flash-attn", "flash-attn-3", "kernels", "transformer-engine", "liger-kernel", "vllm", "ninja", "wandb",
)  # fmt: skip
FLASH_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}


@dataclass(frozen=True)
class LocalMachine:
    """What the checks need to know about a machine. The defaults are a bare CPU machine with nothing installed.

    Attributes:
        accelerator: The device it computes on; the processor if there is nothing else.
        num_devices: Visible accelerators.
        packages: Installed distribution → version.
        has_compiler, has_ninja, has_libaio: Whether it has what DeepSpeed needs to compile its CPU Adam and
            asynchronous I/O.
        folders: For each folder asked about, by its name as given, whether it can be written.
        stale_locks: Locks of extension builds that were killed.
        unheld_locks: These, plus locks of builds that were just killed or run on another machine.
        gpu_links: The link between each pair of GPUs, such as ``NV12`` or ``SYS``; empty if not asked for or not known
            (`gpu_links.with_gpu_links`).
    """

    accelerator: Device = CPU
    num_devices: int = 0
    packages: Mapping[str, str] = field(default_factory=dict)
    has_compiler: bool = False
    has_ninja: bool = False
    has_libaio: bool = False
    num_cores: int = 1
    host_memory_bytes: int = 0
    python_version: str = ""
    system: str = ""
    folders: Mapping[str, bool] = field(default_factory=dict)
    stale_locks: tuple[str, ...] = ()
    unheld_locks: tuple[str, ...] = ()
    gpu_links: tuple[tuple[str, ...], ...] = ()

    @property
    def device(self) -> str:
        """torch's name of the device it computes on: ``cuda``, ``xpu``, ``mps`` … or ``cpu``."""
        return self.accelerator.type

    @property
    def device_name(self) -> str:
        """The device's own name."""
        return self.accelerator.name

    def has(self, package: str) -> bool:
        """True if `package` (a distribution name) is installed."""
        return package in self.packages


def detect_machine(folders: Iterable[str | Path] = ()) -> LocalMachine:
    """Describe this machine, and whether each of `folders` can be written to. Imports torch."""
    import psutil

    packages = installed_packages()
    return LocalMachine(
        **(_detect_accelerators() if "torch" in packages else {}),
        packages=packages,
        has_compiler=shutil.which(os.environ.get("CXX", "c++")) is not None,
        has_ninja=_has_ninja(),
        has_libaio=_has_libaio(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host_memory_bytes=psutil.virtual_memory().total,
        python_version=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        folders={str(name): is_writable(Path(name)) for name in folders},
        stale_locks=stale_build_locks(),
        unheld_locks=unheld_build_locks(),
    )


def refuse_native_windows(system: str | None = None) -> None:
    """Refuse to train or launch on native Windows.

    Args:
        system: As in `LocalMachine.system`; None: this machine's.

    Raises:
        ConfigError: on Windows itself; WSL2 reports Linux.
    """
    name = platform.system() if system is None else system.partition(" ")[0]
    if name == "Windows":
        raise ConfigError(
            "NCCL, DeepSpeed and the memory counters of the recipes do not exist on native Windows.",
            place="this machine",
            fix="install WSL2 (wsl --install), and run it there.",
        )


def installed_packages(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of those packages that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def is_writable(path: Path) -> bool:
    """True if files can be created in `path` or, if it does not exist yet, in its nearest existing parent."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _detect_accelerators() -> dict[str, Any]:
    import torch

    device = detect_device()
    return {"accelerator": device, "num_devices": 0 if device.type == "cpu" else torch.accelerator.device_count()}


def detect_device(device_type: str | None = None) -> Device:
    """The device that torch computes on here, or this machine's device of `device_type`. Imports torch."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = device_type or (accelerator.type if accelerator is not None else "cpu")
    if found == "cpu":
        return Device(name=platform.processor() or platform.machine(), fast_bf16=_cpu_has_bf16())
    if accelerator is None or accelerator.type != found:
        return Device(found, found)  # rehearsal of a device that is not here
    if found == "mps":
        chip = _apple_chip()
        # Metal emulates bf16 on the first two generations.
        emulated = any(f"Apple M{generation}" in chip for generation in (1, 2))
        return Device("mps", chip, computes_bf16=torch.backends.mps.is_macos_or_newer(14, 0), fast_bf16=not emulated)
    if found == "xpu":
        has_bf16 = torch.xpu.is_bf16_supported()
        return Device("xpu", torch.xpu.get_device_name(), computes_bf16=has_bf16, fast_bf16=has_bf16)
    if found != "cuda":
        return Device(found, found)
    properties = torch.cuda.get_device_properties(0)
    card = Device("cuda", properties.name, memory_bytes=properties.total_memory, flash=_installed_flash())
    if torch.version.hip:
        return replace(card, architecture=properties.gcnArchName.partition(":")[0])
    capability = (properties.major, properties.minor)
    return replace(card, capability=capability, built_for=tuple(torch.cuda.get_arch_list()))


def is_surely_cpu(use_cpu: bool | None = None) -> bool:
    """True if `detect_device` would surely find a CPU; takes milliseconds, because it does not import torch.

    True means that this build of torch supports no device and no other package adds one, or that NVIDIA's driver is
    missing. False says nothing: macOS may have Metal, and only torch can query drivers of AMD and Intel.

    Args:
        use_cpu: The setting of the user or the launch file.
    """
    if use_cpu:
        return True
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or sys.platform == "darwin":
        return False
    # torch 2.13: `cuda`, `hip` and `xpu`, each None if torch is not built for it.
    built = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if built.get("hip") or built.get("xpu") or importlib.metadata.entry_points(group="torch.backends"):
        return False
    return not (built["cuda"] and _has_nvidia_driver())


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _installed_flash() -> tuple[str, ...]:
    versions = installed_packages()
    return tuple(name for name, package in FLASH_PACKAGES.items() if package in versions)


def _apple_chip() -> str:
    """``Apple M3 Max``; ``mps`` if the system does not say."""
    import subprocess

    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "mps"


def _cpu_has_bf16() -> bool:
    """True if bf16 products are faster than fp32 ones (names of `torch.cpu.get_capabilities`, torch 2.13).

    x86: AMX, or AVX-512 BF16 on processors other than Intel's. Intel's use AMX for it, which virtual machines may
    hide; their AVX-512 instructions alone were half as fast as fp32 (Emerald Rapids: 147 against 270 GFLOP/s on two
    cores). Arm: the bf16 extension.
    """
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if "intel" in str(capabilities.get("cpu_name", "")).lower():
        return bool(capabilities.get("amx_bf16"))
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def _has_ninja() -> bool:
    """Look where `torch.utils.cpp_extension` looks: on the PATH, which may lack an environment's own bin folder."""
    return shutil.which("ninja") is not None


def _has_libaio() -> bool:
    prefixes = {"/usr", "/usr/local", sys.prefix, os.environ.get("CONDA_PREFIX", "/usr")}
    folders = [Path(p, "include") for p in prefixes]
    folders += [Path(p) for name in ("CPATH", "CPLUS_INCLUDE_PATH") for p in os.environ.get(name, "").split(":") if p]
    folders += [Path(flag[2:]) for flag in os.environ.get("CFLAGS", "").split() if flag.startswith("-I")]
    return any((folder / "libaio.h").is_file() for folder in folders)
