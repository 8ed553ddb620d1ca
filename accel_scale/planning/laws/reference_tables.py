"""Textbook tables of training at scale, computed from their formulas: memory, ZeRO, compute, collectives, links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accel_scale.facts.hardware import PCIE_GIGATRANSFERS, catalogue
from accel_scale.network.collectives import steps
from accel_scale.planning.laws.scaling_laws import plan_scaling

GB = 1e9
# Bytes per parameter, by what is stored: weights, gradients, fp32 master weights, Adam's two moments.
FP32_ADAM = {"weights": 4, "gradients": 4, "master weights": 0, "Adam states": 8}
MIXED_ADAM = {"weights": 2, "gradients": 2, "master weights": 4, "Adam states": 8}
# Both directions together, as NVIDIA states them: links of a GPU × 50 GB/s (25 each way).
NVLINK_LINKS = {"A100": 12, "H100": 18}
NVLINK_GBIT_PER_LINK = 50 * 8
PCIE_LANES = 16
# Exponent and mantissa bits; the largest finite value if the top exponent is not reserved (OCP FP8, E4M3).
FORMATS = {
    "fp32": (8, 23, None),
    "fp16": (5, 10, None),
    "bf16": (8, 7, None),
    "fp8 E4M3": (4, 3, 448.0),
    "fp8 E5M2": (5, 2, None),
}


@dataclass(frozen=True)
class ReferenceTable:
    """A table to print.

    Attributes:
        title: Title with units.
        columns: Names of the columns.
        rows: Cells: words, or numbers in the title's unit.
        note: Remark for the reader; may be empty.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""

    def __iter__(self) -> Iterator[tuple[str | float, ...]]:
        return iter(self.rows)


def reference_tables() -> dict[str, ReferenceTable]:
    """Every table by its short name."""
    return {
        "bytes_per_parameter": bytes_per_parameter(),
        "memory_1b": memory_1b(),
        "memory_7b": memory_7b(),
        "zero": zero_stages(),
        "compute": compute_optimal(),
        "all_reduce": all_reduce_volumes(),
        "links": links(),
        "precisions": precisions(),
    }


def bytes_per_parameter() -> ReferenceTable:
    """4 + 4 + 8 bytes in fp32; 2 + 2 + 4 + 8 in mixed precision: 16 either way."""
    rows: tuple[tuple[str | float, ...], ...] = tuple(
        (name, *map(float, parts.values()), float(sum(parts.values())))
        for name, parts in (("fp32 Adam", FP32_ADAM), ("mixed 16-bit Adam", MIXED_ADAM))
    )
    return ReferenceTable("Training state, bytes per parameter", ("precision", *FP32_ADAM, "total"), rows)


def memory_1b(params: float = 1e9, activations_gb: tuple[float, float] = (2, 8)) -> ReferenceTable:
    """1B parameters in mixed precision: 16 GB of states and 2 to 8 GB of activations."""
    return _ranges("1B parameters, mixed precision, GB", MIXED_ADAM, params, activations_gb)


def memory_7b(params: float = 7e9) -> ReferenceTable:
    """7B parameters in fp32 and in bf16 mixed precision, with 20–40 and 10–20 GB of activations at 2K tokens."""
    fp32 = _ranges("", FP32_ADAM, params, (20, 40)).rows
    mixed = _ranges("", MIXED_ADAM, params, (10, 20)).rows
    rows = tuple((left[0], left[1], right[1]) for left, right in zip(fp32, mixed, strict=True))
    note = (
        "The source prints 102–122 GB for bf16 mixed; its own column (14 + 28 + 14 + 56 = 112, plus 10–20) adds up to "
        "122–132, which is printed here: 102 is less than the states alone. Its fp32 column says 172 where 112 + 40 "
        "is 152."
    )
    return ReferenceTable("7B parameters, GB", ("what", "fp32", "bf16 mixed"), rows, note)


def zero_stages(params: float = 7.5e9, ranks: int = 64, state_bytes: int = 12) -> ReferenceTable:
    """ZeRO paper, figure 1: (2+2+K)Ψ, 4Ψ + KΨ/N, 2Ψ + (2+K)Ψ/N and (4+K)Ψ/N bytes per rank."""
    rows = (
        ("DDP", (2 + 2 + state_bytes) * params / GB),
        ("ZeRO-1: optimizer states", (4 + state_bytes / ranks) * params / GB),
        ("ZeRO-2: and gradients", (2 + (2 + state_bytes) / ranks) * params / GB),
        ("ZeRO-3: and weights", (4 + state_bytes) / ranks * params / GB),
    )
    title = f"Training state per GPU, Ψ = {params / 1e9:g}B, N = {ranks}, K = {state_bytes}, GB"
    return ReferenceTable(title, ("shards", "GB"), rows)


def compute_optimal(sizes: tuple[float, ...] = (1e9, 7e9, 13e9, 70e9, 405e9)) -> ReferenceTable:
    """Twenty tokens per parameter and C = 6ND."""
    plans = [plan_scaling("rule", params=params) for params in sizes]
    rows = tuple((plan.params / 1e9, plan.tokens / 1e9, plan.compute) for plan in plans)
    columns = ("billion parameters", "billion tokens", "FLOPs")
    return ReferenceTable("Compute-optimal training, D = 20N, C = 6ND, N = √(C/120)", columns, rows)


def all_reduce_volumes(workers: tuple[int, ...] = (2, 4, 8, 64)) -> ReferenceTable:
    """Bytes moved by the busiest worker for a tensor of K bytes: 2(N−1) K through one worker, 2(N−1)/N K in a ring."""
    names = ("central", "ring")
    rows = tuple((float(n), *(steps("all_reduce", name, 1, n).num_bytes for name in names)) for n in workers)
    return ReferenceTable(
        "All-reduce, bytes through the busiest worker over K", ("N", "reduce + broadcast", "ring"), rows
    )


def links() -> ReferenceTable:
    """PCIe: GT/s × lanes; NVLink: links × 50 GB/s; Gbit/s."""
    rows: list[tuple[str | float, ...]] = []
    for generation, gigatransfers in PCIE_GIGATRANSFERS.items():
        rows.append((f"PCIe {generation}.0 x{PCIE_LANES}", gigatransfers * PCIE_LANES, 2 * gigatransfers * PCIE_LANES))
    for name, count in NVLINK_LINKS.items():
        rows.append((f"NVLink {name}", count * NVLINK_GBIT_PER_LINK / 2, float(count * NVLINK_GBIT_PER_LINK)))
    note = (
        "One source calls PCIe 4.0 x16 256 and PCIe 5.0 x16 512 Gbit/s aggregate (128 and 256 each way). GT/s × lanes "
        "gives 256 and 512 each way, before 1.5% of line coding; plans use that. NVLink's figures are aggregate."
    )
    return ReferenceTable("Links, Gbit/s", ("link", "each way", "aggregate"), tuple(rows), note)


def precisions() -> ReferenceTable:
    """Bits, largest value and loss scaling of the training formats: (2 − 2^−m) × 2^(2^(e−1) − 1)."""
    rows = []
    for name, (exponent, mantissa, largest) in FORMATS.items():
        value = largest or (2 - 2.0**-mantissa) * 2.0 ** (2 ** (exponent - 1) - 1)
        scaling = "dynamic" if name == "fp16" else "per tensor" if name.startswith("fp8") else "none"
        rows.append((name, float(exponent), float(mantissa), value, scaling))
    return ReferenceTable(
        "Number formats", ("format", "exponent bits", "mantissa bits", "largest", "loss scaling"), tuple(rows)
    )


def gpu_table() -> ReferenceTable:
    """The hardware catalogue: reported memory, bandwidth, bf16 (else fp16) peak, link; unknown is a dash."""
    rows = []
    for gpu in catalogue():
        peaks = gpu.peak_flops or {}
        peak = peaks.get("bf16") or peaks.get("fp16")
        cells = (gpu.memory_bytes / 2**30, gpu.memory_bandwidth, peak, gpu.link_bytes_per_second)
        scales = (1.0, 1e9, 1e12, 1e9)
        numbers = ("–" if value is None else value / scale for value, scale in zip(cells, scales, strict=True))
        rows.append((gpu.name, *numbers, gpu.link))
    columns = ("GPU", "GiB", "memory GB/s", "dense 16-bit TFLOP/s", "link GB/s each way", "link")
    return ReferenceTable("GPU catalogue", columns, tuple(rows))


def _ranges(title: str, parts: dict[str, int], params: float, activations_gb: tuple[float, float]) -> ReferenceTable:
    rows: list[tuple[str | float, ...]] = [(name, each * params / GB) for name, each in parts.items()]
    states = sum(parts.values()) * params / GB
    low, high = activations_gb
    rows += [
        ("states", states),
        ("activations", f"{low:g}–{high:g}"),
        ("total", f"{states + low:g}–{states + high:g}"),
    ]
    return ReferenceTable(title, ("what", "GB"), tuple(rows))
