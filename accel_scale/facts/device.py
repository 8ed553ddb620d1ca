"""A device's description and the defaults that follow: precision, attention kernels, collectives. Pure, no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Gpu, find_gpu

# NVIDIA: Volta (7.0) brought fp16 tensor cores, Ampere (8.0) bf16 and the flash kernels, Ada (8.9) and Hopper (9.0)
# fp8. AMD: matrix units of MI300 and MI350 take fp8.
_FP16_CAPABILITY, _BF16_CAPABILITY, _FP8_CAPABILITY = (7, 0), (8, 0), (8, 9)
_FP8_ARCHITECTURES = ("gfx942", "gfx950")
# FlashAttention 2 runs on every card since Ampere; version 3 is written for Hopper alone.
_FLASH_CAPABILITIES = {
    "flash_attention_2": ((8, 0), (99, 0)),
    "flash_attention_3": ((9, 0), (10, 0)),
}
# torch prefers cuDNN's attention from Hopper on; it compiles a plan for every new shape.
_CUDNN_CAPABILITY = (9, 0)
_FLASH_KERNEL_HEAD_SIZE = 256
# `accel_scale.modeling.packed_attention`, as it is registered with transformers.
PACKED_ATTENTION = "sdpa_packed"
# What ``--attn_implementation`` takes, beside kernels from the hub; their masks, or FlashAttention's
# variable lengths, keep packed documents apart.
ATTENTION_NAMES = ("eager", "sdpa", PACKED_ATTENTION, "flash_attention_2", "flash_attention_3", "flex_attention")
_COLLECTIVES = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}


@dataclass(frozen=True)
class Device:
    """What one process computes on. The default is a CPU.

    Attributes:
        type: torch's name: ``cuda`` (also for AMD), ``xpu``, ``mps`` or ``cpu``.
        name: What it calls itself.
        capability: Of an NVIDIA card; None where it is another device or not known, which is taken for a new one.
        architecture: Of an AMD card, such as ``gfx942``.
        memory_bytes: Its own memory; None where it has none or it is not known.
        computes_bf16: Of a device that is neither NVIDIA's nor AMD's: whether it computes in bf16 at all.
        fast_bf16: Of such a device: whether bf16 products are faster than fp32 ones.
        flash: FlashAttention versions that are installed, such as ``flash_attention_2``.
        built_for: What this build of torch has kernels for, such as ``sm_80`` and ``compute_90``; empty: not asked.
    """

    type: str = "cpu"
    name: str = "CPU"
    capability: tuple[int, int] | None = None
    architecture: str | None = None
    memory_bytes: int | None = None
    computes_bf16: bool = True
    fast_bf16: bool = True
    flash: tuple[str, ...] = ()
    built_for: tuple[str, ...] = ()

    @property
    def is_nvidia(self) -> bool:
        """Whether it is an NVIDIA card."""
        return self.type == "cuda" and self.architecture is None

    @property
    def supports_bf16(self) -> bool:
        """Whether bf16 arithmetic is there and not emulated by a GPU."""
        return self._reaches(_BF16_CAPABILITY) if self.type == "cuda" else self.computes_bf16

    @property
    def native_bf16(self) -> bool:
        """Whether it is also faster than fp32, so that it is a sensible default."""
        return self.supports_bf16 and (self.type == "cuda" or self.fast_bf16)

    @property
    def supports_fp8(self) -> bool:
        """Whether it multiplies fp8 matrices."""
        if self.architecture is not None:
            return self.architecture in _FP8_ARCHITECTURES
        return self.is_nvidia and self._reaches(_FP8_CAPABILITY)

    @property
    def default_precision(self) -> str:
        """What a run computes in where nobody says otherwise."""
        if self.native_bf16:
            return "bf16"
        return "fp16" if self.type == "cuda" and self._reaches(_FP16_CAPABILITY) else "fp32"

    @property
    def precision_note(self) -> str | None:
        """One sentence where `default_precision` is not what a GPU's owner expects; None elsewhere."""
        if self.type == "cpu" or self.native_bf16:
            return None
        scaled = " and scales its loss" if self.default_precision == "fp16" else ""
        return f"{self.name} has no fast bf16 arithmetic, so this run computes in {self.default_precision}{scaled}."

    @property
    def collective_backend(self) -> str | None:
        """The backend for tensors on it; None: no collectives there, so one process is all it can serve."""
        return _COLLECTIVES.get(self.type)

    @property
    def plans_attention_per_shape(self) -> bool:
        """Whether SDPA may choose cuDNN, which compiles again for every length that it has not seen."""
        return self.is_nvidia and self._reaches(_CUDNN_CAPABILITY)

    @property
    def has_flash_kernel(self) -> bool:
        """Whether SDPA's own flash kernel runs on it."""
        return self.is_nvidia and self._reaches(_BF16_CAPABILITY)

    def shares_key_heads(self, *, half: bool, masked: bool, key_size: int, value_size: int) -> bool:
        """Whether SDPA serves groups of query heads from one key head without forming whole score matrices.

        On NVIDIA only the flash kernel does (and cuDNN's): half precision, no mask, equal head sizes up to 256. Of
        other GPUs nothing is assumed: repeating key and value heads costs little beside a length × length matrix.
        """
        if self.type == "cpu":
            return True
        fits = self.flash_head_refusal(key_size, value_size) is None
        return self.has_flash_kernel and half and not masked and fits

    def flash_head_refusal(self, key_size: int, value_size: int) -> str | None:
        """Why torch's flash kernel does not take heads of these sizes; None where it does."""
        if key_size != value_size:
            return f"values have heads of {value_size} and keys of {key_size}"
        return None if key_size <= _FLASH_KERNEL_HEAD_SIZE else f"heads of {key_size} exceed {_FLASH_KERNEL_HEAD_SIZE}"

    def flash_refusal(self, name: str) -> str | None:
        """Why FlashAttention's `name` does not run on it; None where it does."""
        if self.type != "cuda":
            return f"{name} needs a CUDA device and this run is on {self.type}"
        low, high = _FLASH_CAPABILITIES[name]
        if self.architecture is not None:
            return None if name == "flash_attention_2" else f"{name} is written for NVIDIA's Hopper cards"
        if self.capability is None or low <= self.capability < high:
            return None
        found = f"{self.name} has {self.capability[0]}.{self.capability[1]}"
        if self.capability >= high:
            return f"{name} is written for compute capability {low[0]}.x, and {found}"
        return f"{name} needs compute capability {low[0]}.{low[1]}, and {found}"

    @property
    def has_kernels(self) -> bool:
        """Whether this build of torch can run on it: code of its generation, or older code that can be translated."""
        if not self.built_for or self.capability is None or not self.is_nvidia:
            return True
        major, minor = self.capability
        for built in self.built_for:
            kind, _, number = built.partition("_")
            digits = number.rstrip("af")  # sm_90a: for that very capability
            if not digits.isdigit():
                continue
            built_major, built_minor = divmod(int(digits), 10)
            if kind == "compute" and (built_major, built_minor) <= (major, minor):
                return True
            exact = digits != number
            if kind == "sm" and built_major == major and (built_minor == minor if exact else built_minor <= minor):
                return True
        return False

    def _reaches(self, capability: tuple[int, int]) -> bool:
        return not self.is_nvidia or self.capability is None or self.capability >= capability


CPU = Device()


def device_of(gpu: Gpu) -> Device:
    """The device that a card of the planner's catalogue is."""
    known = gpu.compute_capability or ""
    if known.startswith("gfx"):
        return Device("cuda", gpu.name, architecture=known, memory_bytes=gpu.memory_bytes)
    major, _, minor = known.partition(".")
    capability = (int(major), int(minor)) if minor else None
    return Device("cuda", gpu.name, capability=capability, memory_bytes=gpu.memory_bytes)


def device_named(text: str, *, place: str = "--gpu") -> Device:
    """The device of the catalogue's card called `text`.

    Raises:
        ConfigError: as `find_gpu`.
    """
    return device_of(find_gpu(text, place=place))


def check_attention_name(name: str, *, place: str) -> None:
    """Refuse what is neither one of `ATTENTION_NAMES` nor a kernel's repository, such as ``kernels-community/…``.

    Raises:
        ConfigError: with the nearest name.
    """
    if name in ATTENTION_NAMES or "/" in name:
        return
    nearest = difflib.get_close_matches(name, ATTENTION_NAMES, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(
        f"{name!r} is not an attention implementation.", place=place, fix=f"{hint}use {', '.join(ATTENTION_NAMES)}."
    )
