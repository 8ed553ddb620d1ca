"""The ways to spread a run over GPUs, from the simplest to the last resort, and what does not go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accel_scale.planning.model_facts import ModelFacts
from accel_scale.planning.shadow_families import changes_products
from accel_scale.planning.training_setup import ParallelSetup, TrainingSetup


@dataclass(frozen=True)
class Choice:
    """One way to spread a run.

    Attributes:
        label: For tables.
        parallel: Its settings.
        effort: Rank among equals: the simpler, the lower.
    """

    label: str
    parallel: ParallelSetup
    effort: int


# label, strategy, settings; in the order of the decision tree: nothing shared, then the lowest stage that fits.
_SHARDED: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("DDP", "ddp", {}),
    ("ZeRO-1", "zero1", {}),
    ("FSDP2 SHARD_GRAD_OP", "fsdp2", {"reshard_after_forward": False}),
    ("ZeRO-2", "zero2", {}),
    ("FSDP2", "fsdp2", {}),
    ("ZeRO-3", "zero3", {}),
    ("FSDP2 + CPU offload", "fsdp2", {"offload_params": "cpu", "offload_optimizer": "cpu"}),
    ("ZeRO-2 + CPU offload", "zero2", {"offload_optimizer": "cpu"}),
    ("ZeRO-3 + CPU offload", "zero3", {"offload_params": "cpu", "offload_optimizer": "cpu"}),
    ("ZeRO-Infinity", "zero3", {"offload_params": "nvme", "offload_optimizer": "nvme"}),
)
_ALONE = ("ZeRO-2 + CPU offload", "ZeRO-3 + CPU offload", "ZeRO-Infinity")


def choices(num_gpus: int, gpus_per_node: int) -> Iterator[Choice]:
    """Every strategy for `num_gpus` GPUs."""
    if num_gpus == 1:
        yield Choice("one GPU", ParallelSetup(gpus_per_node=gpus_per_node), 0)
    for effort, (label, strategy, settings) in enumerate(_SHARDED, start=1):
        if num_gpus == 1 and label not in _ALONE:
            continue
        parallel = ParallelSetup(strategy, num_gpus, gpus_per_node, **settings)  # type: ignore[arg-type]
        yield Choice(label, parallel, effort)
    num_nodes = num_gpus // gpus_per_node
    if num_nodes > 1 and num_gpus % gpus_per_node == 0 and gpus_per_node > 1:
        parallel = ParallelSetup("fsdp2", num_gpus, gpus_per_node, num_replicas=num_nodes)
        yield Choice("FSDP2 hybrid", parallel, 5)


def conflict(setup: TrainingSetup, model: ModelFacts | None = None) -> str | None:
    """Why the libraries cannot run this combination; None where they can."""
    if model is not None and setup.checkpointing == "selective" and changes_products(model):
        return "the model changes results in place that selective checkpointing keeps"
    parallel, optimizer = setup.parallel, setup.optimizer
    if setup.sync_each_batch and (parallel.strategy != "fsdp2" or parallel.is_divided):
        return "gradients of every micro-batch are reduced under FSDP2 only, where ranks do not share the model"
    if parallel.is_deepspeed and setup.precision in ("bf16_true", "fp8"):
        return f"DeepSpeed does not run {setup.precision}"
    if parallel.strategy.startswith("fsdp"):
        if "bnb" in optimizer or optimizer.startswith(("paged_", "lion_", "ademamix", "adamw_8bit", "adafactor")):
            return f"{optimizer} cannot step FSDP2's sharded tensors"
        if optimizer == "adamw_torch_4bit":
            return "torchao's 4-bit step does not compile for FSDP2's sharded tensors"
    if parallel.is_deepspeed and optimizer in ("adamw_torch_8bit", "adamw_torch_4bit", "adamw_cpu_offload"):
        return f"ZeRO flattens weights, which {optimizer} cannot step"
    if parallel.offload_optimizer != "none":
        if not optimizer.startswith(("adamw_torch", "deepspeed_cpu_adam")):
            return "offloaded states are stepped by AdamW only"
    elif optimizer == "deepspeed_cpu_adam":
        return "deepspeed_cpu_adam steps weights in host memory only"
    if optimizer == "adamw_cpu_offload" and (parallel.strategy != "single" or setup.precision == "fp16"):
        return "adamw_cpu_offload is for one process without loss scaling"
    if parallel.strategy == "zero3" and setup.method != "full" and setup.checkpointing in ("selective", "offload"):
        return f"ZeRO-3 with adapters cannot recompute under {setup.checkpointing} checkpointing"
    return None
