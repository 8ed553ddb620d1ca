"""A device's description and the defaults that follow: precision, attention kernels, collectives. Pure, no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Gpu, find_gpu

# NVIDIA: Volta (7.0) brought fp16 tensor cores, Ampere (8.0) bf16 and the flash kernels, Ada (8.9) and Hopper (9.0)
# fp8. AMD: the matrix units of MI300 and MI350 support fp8.
_FP16_CAPABILITY, _BF16_CAPABILITY, _FP8_CAPABILITY = (7, 0), (8, 0), (8, 9)
_FP8_ARCHITECTURES = ("gfx942", "gfx950")
# FlashAttention 2 runs on every card since Ampere; version 3 is written for Hopper only.
_FLASH_CAPABILITIES = {
    "flash_attention_2": ((8, 0), (99, 0)),
    "flash_attention_3": ((9, 0), (10, 0)),
}
# From Hopper on, torch prefers cuDNN's attention, which compiles a plan for every new shape.
_CUDNN_CAPABILITY = (9, 0)
_FLASH_KERNEL_HEAD_SIZE = 256
# The name under which `accel_scale.modeling.packed_attention` is registered with transformers.
PACKED_ATTENTION = "sdpa_packed"
# Values of ``--attn_implementation``, besides kernels from the hub. Their masks, or FlashAttention's
# variable lengths, keep packed documents apart.
ATTENTION_NAMES = ("eager", "sdpa", PACKED_ATTENTION, "flash_attention_2", "flash_attention_3", "flex_attention")
_COLLECTIVES = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}


@dataclass(frozen=True)
class Device:
    """The device of one process; a CPU by default.

    Attributes:
        type: torch's name: ``cuda`` (also for AMD), ``xpu``, ``mps`` or ``cpu``.
        name: Name that the device reports.
        capability: Compute capability of an NVIDIA card; None for other devices or if unknown (taken for a new card).
        architecture: Architecture of an AMD card, such as ``gfx942``.
        memory_bytes: The device's own memory; None if it has none or the size is unknown.
        computes_bf16: For a device that is neither NVIDIA's nor AMD's: whether it computes in bf16 at all.
        fast_bf16: For such a device: whether bf16 products are faster than fp32 ones.
        flash: Installed versions of FlashAttention, such as ``flash_attention_2``.
        built_for: Targets of this build of torch, such as ``sm_80`` and ``compute_90``; empty if not queried.
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
        """True for an NVIDIA card."""
        return self.type == "cuda" and self.architecture is None

    @property
    def supports_bf16(self) -> bool:
        """True if bf16 arithmetic is available and not emulated by a GPU."""
        return self._reaches(_BF16_CAPABILITY) if self.type == "cuda" else self.computes_bf16

    @property
    def native_bf16(self) -> bool:
        """True if bf16 is supported and faster than fp32, which makes it a sensible default."""
        return self.supports_bf16 and (self.type == "cuda" or self.fast_bf16)

    @property
    def supports_fp8(self) -> bool:
        """True if the device multiplies fp8 matrices."""
        if self.architecture is not None:
            return self.architecture in _FP8_ARCHITECTURES
        return self.is_nvidia and self._reaches(_FP8_CAPABILITY)

    @property
    def default_precision(self) -> str:
        """The precision of a run that does not ask for one."""
        if self.native_bf16:
            return "bf16"
        return "fp16" if self.type == "cuda" and self._reaches(_FP16_CAPABILITY) else "fp32"

    @property
    def precision_note(self) -> str | None:
        """One sentence if `default_precision` is not what a GPU's owner expects, else None."""
        if self.type == "cpu" or self.native_bf16:
            return None
        scaled = " and scales its loss" if self.default_precision == "fp16" else ""
        return f"{self.name} has no fast bf16 arithmetic, so this run computes in {self.default_precision}{scaled}."

    @property
    def collective_backend(self) -> str | None:
        """The backend for tensors on the device; None if it has no collectives and can serve only one process."""
        return _COLLECTIVES.get(self.type)

    @property
    def plans_attention_per_shape(self) -> bool:
        """True if SDPA may choose cuDNN, which recompiles for every new length."""
        return self.is_nvidia and self._reaches(_CUDNN_CAPABILITY)

    @property
    def has_flash_kernel(self) -> bool:
        """True if SDPA's own flash kernel runs on the device."""
        return self.is_nvidia and self._reaches(_BF16_CAPABILITY)

    def shares_key_heads(self, *, half: bool, masked: bool, key_size: int, value_size: int) -> bool:
        """True if SDPA serves groups of query heads from one key head without forming whole score matrices.

        On NVIDIA, only the flash kernel (and cuDNN's) does: half precision, no mask, equal head sizes up to 256. Other
        GPUs are assumed not to: repeating key and value heads costs little compared with a length × length matrix.
        """
        if self.type == "cpu":
            return True
        fits = self.flash_head_refusal(key_size, value_size) is None
        return self.has_flash_kernel and half and not masked and fits

    def flash_head_refusal(self, key_size: int, value_size: int) -> str | None:
        """Why torch's flash kernel does not support heads of these sizes; None if it does."""
        if key_size != value_size:
            return f"values have heads of {value_size} and keys of {key_size}"
        return None if key_size <= _FLASH_KERNEL_HEAD_SIZE else f"heads of {key_size} exceed {_FLASH_KERNEL_HEAD_SIZE}"

    def flash_refusal(self, name: str) -> str | None:
        """Why FlashAttention's `name` does not run on the device; None if it does."""
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
        """True if this build of torch has code for the device's generation, or older code that can be translated."""
        if not self.built_for or self.capability is None or not self.is_nvidia:
            return True
        major, minor = self.capability
        for built in self.built_for:
            kind, _, number = built.partition("_")
            digits = number.rstrip("af")  # sm_90a: for exactly that capability
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
    """The `Device` of a card in the planner's catalogue."""
    known = gpu.compute_capability or ""
    if known.startswith("gfx"):
        return Device("cuda", gpu.name, architecture=known, memory_bytes=gpu.memory_bytes)
    major, _, minor = known.partition(".")
    capability = (int(major), int(minor)) if minor else None
    return Device("cuda", gpu.name, capability=capability, memory_bytes=gpu.memory_bytes)


def device_named(text: str, *, place: str = "--gpu") -> Device:
    """The `Device` of the catalogue's card called `text`.

    Raises:
        ConfigError: as `find_gpu`.
    """
    return device_of(find_gpu(text, place=place))


def check_attention_name(name: str, *, place: str) -> None:
    """Refuse a name that is neither in `ATTENTION_NAMES` nor a kernel's repository, such as ``kernels-community/…``.

    Raises:
        ConfigError: naming the nearest valid name.
    """
    if name in ATTENTION_NAMES or "/" in name:
        return
    nearest = difflib.get_close_matches(name, ATTENTION_NAMES, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(
        f"{name!r} is not an attention implementation.", place=place, fix=f"{hint}use {', '.join(ATTENTION_NAMES)}."
    )
