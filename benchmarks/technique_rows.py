"""Building blocks of `techniques.py`: rows of figures, the work that fills them, and the ladder's rungs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup

# Numbers by name, and text where a number needs it.
Values = Mapping[str, float | str]
KINDS = ("arithmetic", "predicted", "measured")


@dataclass(frozen=True)
class Work:
    """One piece of a stage.

    Attributes:
        rows: Names of the rows that `run` returns.
        run: Returns the values of each row.
    """

    rows: tuple[str, ...]
    run: Callable[[], Mapping[str, Values]]


@dataclass(frozen=True)
class Stage:
    """A stage with work of one kind.

    Attributes:
        name: Name for ``--stages``.
        kind: One of `KINDS`.
        how: Description of the figures, shown with them.
        works: Pieces of work in order; results are saved after each.
    """

    name: str
    kind: str
    how: str
    works: tuple[Work, ...]


@dataclass(frozen=True)
class Rung:
    """One technique on the ladder.

    Attributes:
        name: Name of its row.
        label: Label in the table.
        on: The rung that it is added to; None for the first.
        changes: Fields of `TrainingSetup` that differ from that rung's.
    """

    name: str
    label: str
    on: str | None
    changes: Mapping[str, Any]


RUNGS = (
    Rung("baseline", "fp32, eager attention, whole logits, AdamW", None, {}),
    Rung("attention", "+ fused attention (sdpa)", "baseline", {"attention": "sdpa"}),
    Rung("loss", "+ chunked loss", "attention", {"loss": "chunked"}),
    Rung("bf16", "+ bf16 mixed precision", "loss", {"precision": "bf16"}),
    Rung("accumulation", "+ accumulation, a quarter of the micro-batch", "bf16", {"accumulation": 4}),
    Rung("every_3", "+ checkpointing, every 3rd layer", "bf16", {"checkpointing": "every_3"}),
    Rung("every_2", "+ checkpointing, every 2nd layer", "bf16", {"checkpointing": "every_2"}),
    Rung("selective", "+ checkpointing, products and attention kept", "bf16", {"checkpointing": "selective"}),
    Rung("full", "+ checkpointing, every layer", "bf16", {"checkpointing": "full"}),
    Rung("offload", "+ checkpointing, layers' inputs in host memory", "bf16", {"checkpointing": "offload"}),
    Rung("bf16_true", "bf16 weights and states", "full", {"precision": "bf16_true"}),
    Rung("adamw_8bit", "8-bit AdamW", "full", {"optimizer": "adamw_8bit"}),
    Rung("adamw_4bit", "4-bit AdamW", "full", {"optimizer": "adamw_torch_4bit"}),
    Rung("adafactor", "Adafactor", "full", {"optimizer": "adafactor"}),
    Rung("momentum", "SGD with momentum", "full", {"optimizer": "sgd_momentum"}),
    Rung("sgd", "SGD", "full", {"optimizer": "sgd"}),
    Rung("lora", "LoRA, rank 16", "full", {"method": "lora"}),
    Rung("lora_1", "LoRA, rank 1", "full", {"method": "lora", "lora": LoraSetup(rank=1)}),
    Rung("qlora", "QLoRA, rank 16", "full", {"method": "qlora"}),
    Rung("qlora_1", "QLoRA, rank 1", "full", {"method": "qlora", "lora": LoraSetup(rank=1)}),
)

# Strategies, at the same global batch as the first; the argument is the number of ranks.
PARALLEL_RUNGS: tuple[tuple[str, str, Callable[[int], ParallelSetup]], ...] = (
    ("ddp", "DDP", lambda n: ParallelSetup("ddp", n)),
    ("zero1", "ZeRO-1", lambda n: ParallelSetup("zero1", n)),
    ("zero2", "ZeRO-2", lambda n: ParallelSetup("zero2", n)),
    ("zero3", "ZeRO-3", lambda n: ParallelSetup("zero3", n)),
    ("fsdp2_grad_op", "FSDP2, SHARD_GRAD_OP", lambda n: ParallelSetup("fsdp2", n, reshard_after_forward=False)),
    ("fsdp2", "FSDP2, FULL_SHARD", lambda n: ParallelSetup("fsdp2", n)),
    (
        "fsdp2_offload",
        "FSDP2 + CPU offload",
        lambda n: ParallelSetup("fsdp2", n, offload_params="cpu", offload_optimizer="cpu"),
    ),
    ("zero2_offload", "ZeRO-2 + CPU offload", lambda n: ParallelSetup("zero2", n, offload_optimizer="cpu")),
    (
        "zero3_offload",
        "ZeRO-3 + CPU offload",
        lambda n: ParallelSetup("zero3", n, offload_params="cpu", offload_optimizer="cpu"),
    ),
    (
        "zero_infinity",
        "ZeRO-Infinity, NVMe",
        lambda n: ParallelSetup("zero3", n, offload_params="nvme", offload_optimizer="nvme"),
    ),
    ("tp", "tensor parallelism", lambda n: ParallelSetup("ddp", n, tensor_parallel=n)),
    ("pp", "pipeline parallelism, 1F1B", lambda n: ParallelSetup("ddp", n, pipeline_parallel=n)),
    ("sp", "sequence parallelism + FSDP2", lambda n: ParallelSetup("fsdp2", n, sequence_parallel=n)),
)

# Strategies of PARALLEL_RUNGS whose buckets on four processes (about 6 GB each) filled a machine with 23.5 GiB.
TOO_LARGE_ON_FOUR = ("zero2", "zero2_offload")


def ladder(first: TrainingSetup, middle: str = "bf16") -> dict[str, TrainingSetup]:
    """Every rung's settings by name; `first` gives sizes and batch, with a micro-batch divisible by four.

    Rungs on top of mixed precision are put on `middle` instead, if mixed precision is slow.
    """
    setups: dict[str, TrainingSetup] = {}
    for rung in RUNGS:
        on = rung_below(rung, middle)
        below = setups[on] if on else replace(first, precision="fp32", attention="eager", loss="full")
        changes = dict(rung.changes)
        if "accumulation" in changes:
            changes["micro_batch_size"] = below.micro_batch_size // changes["accumulation"]
        setups[rung.name] = replace(below, **changes)
    return setups


def rung_below(rung: Rung, middle: str = "bf16") -> str | None:
    """The name of the rung that `rung` is added to."""
    return middle if rung.on == "bf16" else rung.on


def with_ratios(figures: Mapping[str, dict[str, float]], middle: str = "bf16") -> dict[str, dict[str, float | str]]:
    """Ladder figures with ratios of each rung to the one below and to the first.

    A row has at least ``bytes``, ``activation_bytes``, and ``seconds`` or, if a run measured ratios itself, ``speed``
    relative to the first.
    """
    first = figures[RUNGS[0].name]
    found: dict[str, dict[str, float | str]] = {}
    for rung in RUNGS:
        own, on = figures[rung.name], rung_below(rung, middle)
        below = figures[on] if on else own
        own.setdefault("speed", first["seconds"] / own["seconds"] if "seconds" in own else 1.0)
        step, kept = own["speed"] / below["speed"], own["activation_bytes"] / below["activation_bytes"]
        found[rung.name] = {
            **own,
            "on": on or "",
            "speed_step": step,
            "slower_step": 1 / step - 1,
            "bytes_step": own["bytes"] / below["bytes"],
            "bytes_total": own["bytes"] / first["bytes"],
            "saved_step": 1 - own["bytes"] / below["bytes"],
            "activation_step": kept,
            "activation_saved_step": 1 - kept,
        }
    return found
