"""GPUs by name, links between them, and the machine of a plan; unknown speeds stay unknown."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from accel_scale.network.link_fit import MeasuredLinks

# CUDA context, loaded kernels and cuBLAS workspaces of one PyTorch process: 0.5–0.9 GiB seen on A100.
CONTEXT_BYTES = int(0.7 * 2**30)
# For a card given only by its size: a 24 GiB GeForce reports 23.5 GiB, 2% less than is printed on the box.
UNNAMED_DRIVER_FRACTION = 0.02

# Gbit/s one way, all ports of a server together: a 10 GbE card; one InfiniBand HDR or NDR port; eight of them, one per
# GPU, in DGX A100 and DGX H100 class servers; AWS p4d and p5.
NETWORK_GBIT_PER_SECOND: Mapping[str, float] = {
    "ethernet-10g": 10,
    "ethernet-25g": 25,
    "ethernet-100g": 100,
    "ethernet-400g": 400,
    "infiniband-hdr": 200,
    "infiniband-ndr": 400,
    "infiniband-8xhdr": 1600,
    "infiniband-8xndr": 3200,
    "efa-400g": 400,
    "efa-3200g": 3200,
}
# GT/s per lane and bits of payload per bit sent (128b/130b) of PCIe 3, 4 and 5.
PCIE_GIGATRANSFERS: Mapping[int, float] = {3: 8, 4: 16, 5: 32}
PCIE_PAYLOAD = 128 / 130
# Eight channels of DDR4-3200 give 205 GB/s, two of DDR5-5600 90: half of the larger figure, reached by ordinary code.
ASSUMED_HOST_BANDWIDTH = 100e9

_VENDOR_WORDS = re.compile(r"\b(nvidia|geforce|tesla|amd|instinct|gpu|graphics)\b")
_SIZE = re.compile(r"\s*[0-9.]+(?:e[0-9]+)?\s*[kmgt]i?b\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """One accelerator; `None` where a value is unknown.

    Attributes:
        name: The catalogue's name, or what the user gave.
        memory_bytes: The card's total as CUDA or ROCm reports it, which is below the figure on the box.
        memory_bandwidth: Bytes per second to and from its own memory.
        peak_flops: Dense FLOP/s by dtype (fp32, tf32, fp16, bf16, fp8), with fp32 accumulation.
        link: ``nvlink``, ``infinity_fabric`` or ``pcie``.
        link_bytes_per_second: Bandwidth to the other GPUs of its server, one way.
        pcie_bytes_per_second: Bandwidth to the host, one way.
        watts: Board power limit.
        compute_capability: CUDA's ``8.9`` or ROCm's ``gfx942``.
        usable_bytes: `memory_bytes` less the context that every process needs (`CONTEXT_BYTES`).
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    memory_bandwidth: float | None = None
    peak_flops: Mapping[str, float | None] | None = None
    link: str = "pcie"
    link_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    watts: float | None = None
    compute_capability: str | None = None

    @property
    def supports_bf16(self) -> bool | None:
        """True if its matrix units support bf16; `None` if unknown."""
        return None if self.peak_flops is None else self.peak_flops.get("bf16") is not None

    @property
    def supports_fp8(self) -> bool | None:
        """True if its matrix units support fp8; `None` if unknown."""
        return None if self.peak_flops is None else self.peak_flops.get("fp8") is not None

    def flops(self, dtype: str) -> float:
        """Dense peak FLOP/s; raises `ConfigError` if unknown."""
        peak = (self.peak_flops or {}).get(dtype)
        if peak is None:
            reason = "is not known" if self.peak_flops is None else "does not exist: its matrix units lack it"
            raise ConfigError(
                f"the {dtype} speed of {self.name} {reason}.",
                place="--gpu",
                fix="name a card of the catalogue, or another precision." if self.peak_flops else "name the card.",
            )
        return peak

    def bandwidth(self) -> float:
        """Bytes per second to and from its own memory; raises `ConfigError` if unknown."""
        return _known(self.memory_bandwidth, f"the memory bandwidth of {self.name}")

    def link_bandwidth(self) -> float:
        """Bytes per second to the other GPUs of the server, one way; raises `ConfigError` if unknown."""
        return _known(self.link_bytes_per_second, f"the link between {self.name} cards")

    def pcie_bandwidth(self) -> float:
        """Bytes per second to the host, one way; raises `ConfigError` if unknown."""
        return _known(self.pcie_bytes_per_second, f"the PCIe link of {self.name}")


@dataclass(frozen=True)
class Machine:
    """The machine that a run is planned for.

    Attributes:
        gpu: The model of all its GPUs.
        num_gpus: Number of GPUs in all servers.
        gpus_per_node: Number of GPUs in one server.
        host_memory_bytes: Host memory of one server; `None` if unknown.
        host_bandwidth: Bytes per second of a server's memory; `None`: `ASSUMED_HOST_BANDWIDTH`, and estimates say so.
        internode_bytes_per_second: Bandwidth out of one server, one way; `None` if unknown.
        nvme_bytes_per_second: Bandwidth of one server's drives; `None` if unknown.
        price_per_gpu_hour: Price in any currency; `None` if unknown.
        links: Measured links, which replace the card's and the network's; `None` if there are none.
    """

    gpu: Gpu
    num_gpus: int = 1
    gpus_per_node: int = 8
    host_memory_bytes: int | None = None
    host_bandwidth: float | None = None
    internode_bytes_per_second: float | None = None
    nvme_bytes_per_second: float | None = None
    price_per_gpu_hour: float | None = None
    links: MeasuredLinks | None = None

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}.", place=f"--{name}", fix="give 1 or more.")

    @property
    def num_nodes(self) -> int:
        """Number of servers."""
        return -(-self.num_gpus // self.gpus_per_node)

    def internode_bandwidth(self) -> float:
        """Bytes per second out of one server, one way; raises `ConfigError` if unknown."""
        fix = f"give --network, one of {', '.join(NETWORK_GBIT_PER_SECOND)}."
        return _known(self.internode_bytes_per_second, "the network between servers", fix)


def pcie_bytes_per_second(generation: int, lanes: int = 16) -> float:
    """Payload one way: GT/s × lanes × 128/130 / 8 bits. Gen 4 x16: 31.5 GB/s."""
    return PCIE_GIGATRANSFERS[generation] * lanes * PCIE_PAYLOAD / 8 * 1e9


def network_bytes_per_second(name: str, *, place: str = "--network") -> float:
    """Bytes per second out of a server, one way, from the name of its network or a figure like ``25GB`` (per second).

    Raises:
        ConfigError: naming the nearest network.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key in NETWORK_GBIT_PER_SECOND:
        return NETWORK_GBIT_PER_SECOND[key] * 1e9 / 8
    if _SIZE.fullmatch(name):
        return float(parse_bytes(name, place=place))
    raise _not_found(
        name, "network", NETWORK_GBIT_PER_SECOND, place, "use one of {all}, or bytes per second like 25GB."
    )


def catalogue() -> tuple[Gpu, ...]:
    """All GPUs of the catalogue, consumer cards first."""
    return tuple(_cards().values())


def find_gpu(text: str, *, place: str = "--gpu") -> Gpu:
    """The card called `text` (``4090``, ``A100 80GB SXM``, a CUDA device name), or one of a given size (``24GiB``).

    A size gives an unnamed card, whose memory is known and whose speed is not.

    Raises:
        ConfigError: if several cards match the name (all are listed), or none does (the nearest is named).
    """
    key = _key(text)
    names = _names()
    if key in names:
        return _cards()[names[key]]
    if _SIZE.fullmatch(text):
        return _unnamed(parse_bytes(text, place=place))
    matches = sorted({card for name, card in names.items() if len(key) >= 3 and _is_part(key, name)})
    if len(matches) == 1:
        return _cards()[matches[0]]
    if matches:
        raise ConfigError(f"{text!r} is several cards.", place=place, fix=f"use one of {', '.join(matches)}.")
    raise _not_found(
        text, "GPU", _cards(), place, "use {near}a card of the catalogue, or its memory like 24GiB.", names
    )


def detect_local() -> Machine | None:
    """This machine's GPUs and memory; `None` without a GPU that torch sees. Imports torch when called."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    try:
        known = find_gpu(properties.name)
    except ConfigError:
        known = Gpu(properties.name, 0, 0)
    total = int(properties.total_memory)
    gpu = replace(known, memory_bytes=total, usable_bytes=max(0, total - CONTEXT_BYTES))
    return Machine(gpu, num_gpus=count, gpus_per_node=count, host_memory_bytes=host_memory_bytes())


def host_memory_bytes(meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max") -> int | None:
    """Memory of this host, or of this container if it is limited to less; `None` if unknown."""
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB", Path(meminfo).read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is None:
        return None
    total = int(match.group(1)) * 1024
    text = Path(limit).read_text().strip() if Path(limit).is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def _unnamed(num_bytes: int) -> Gpu:
    usable = int(num_bytes * (1 - UNNAMED_DRIVER_FRACTION)) - CONTEXT_BYTES
    return Gpu(f"{format_bytes(num_bytes)} card", num_bytes, max(0, usable))


@functools.cache
def _cards() -> dict[str, Gpu]:
    document = json.loads((Path(__file__).parent / "data" / "gpus.json").read_text(encoding="utf-8"))
    return {entry["name"]: _card(entry) for entry in document["gpus"]}


def _card(entry: dict[str, Any]) -> Gpu:
    reported = entry["reported_gib"]
    memory = int(reported * 2**30) if reported else int(entry["nominal_gb"] * 1e9)
    pcie = pcie_bytes_per_second(**entry["pcie"]) if entry["pcie"] else None
    link = entry["link"] or {"kind": "pcie", "gb_per_s_each_way": pcie / 1e9 if pcie else None}
    speed = link["gb_per_s_each_way"]
    return Gpu(
        name=entry["name"],
        memory_bytes=memory,
        usable_bytes=memory - CONTEXT_BYTES,
        memory_bandwidth=entry["bandwidth_gb_per_s"] * 1e9,
        peak_flops={dtype: value and value * 1e12 for dtype, value in entry["tflops"].items()},
        link=link["kind"],
        link_bytes_per_second=speed and speed * 1e9,
        pcie_bytes_per_second=pcie,
        watts=entry["watts"],
        compute_capability=entry["compute_capability"],
    )


@functools.cache
def _names() -> dict[str, str]:
    document = json.loads((Path(__file__).parent / "data" / "gpus.json").read_text(encoding="utf-8"))
    return {_key(name): entry["name"] for entry in document["gpus"] for name in (entry["name"], *entry["aliases"])}


def _key(text: str) -> str:
    """Lower-case words without vendor and series names: ``NVIDIA GeForce RTX 4090`` → ``rtx 4090``."""
    words = _VENDOR_WORDS.sub(" ", re.sub(r"[-_/]|(?<=rtx)(?=\d)", " ", text.lower()))
    return re.sub(r"(?<=\d) (?=g?b\b)", "", " ".join(words.split()))


def _is_part(key: str, name: str) -> bool:
    """True if all words of `key` are words of `name`, in any order."""
    return set(key.split()) <= set(name.split())


def _known(value: float | None, what: str, fix: str = "name a card of the catalogue that has it.") -> float:
    if value is None:
        raise ConfigError(f"{what} is not known.", place="--gpu" if "card" in fix else "--network", fix=fix)
    return value


def _not_found(
    text: str, kind: str, choices: Mapping[str, Any], place: str, fix: str, aliases: Mapping[str, str] | None = None
) -> ConfigError:
    keys = dict(aliases or {name: name for name in choices})
    nearest = difflib.get_close_matches(_key(text) if aliases else text.lower(), list(keys), n=1, cutoff=0.5)
    near = f"{keys[nearest[0]]} (nearest), " if nearest else ""
    fix = fix.format(all=", ".join(choices), near=near)
    return ConfigError(f"{text!r} is not a known {kind}.", place=place, fix=fix)
