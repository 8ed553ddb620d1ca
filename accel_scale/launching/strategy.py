"""How a launch splits a run: strategy, shards, replicas and offload, from a launch file's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.facts.strategies import Offloading, Strategy, strategy_named

if TYPE_CHECKING:
    from accel_scale.launching.launch_keys import SourceFile

_TRUE = {"1", "true", "yes", "on", "y", "t"}


@dataclass(frozen=True)
class LaunchStrategy(Offloading):
    """How weights, gradients and optimizer states are distributed, and where they are kept.

    Attributes:
        name: One of `facts.strategies`.
        offload_optimizer: ``none``, ``cpu`` or ``nvme``.
        offload_params: ``none``, ``cpu`` or ``nvme``.
        nvme_paths: Folders to which DeepSpeed writes states.
        num_replicas: Groups that each hold all shards (FSDP2 hybrid); 1 for a full shard.
        num_shards: Ranks that one replica is spread over; None: all ranks of the replica.
        tensor_parallel_size: Ranks that share each matrix product.
        context_parallel_size: Ranks that share each sequence (ring attention or Ulysses).
        sequence_parallel_size: The same, if it is Ulysses.
        use_cpu: Whether not to use accelerators.
        fsdp: The ``fsdp_config`` keys with their prefix.
        deepspeed: The DeepSpeed configuration in DeepSpeed's own layout.
    """

    name: str
    offload_optimizer: str = "none"
    offload_params: str = "none"
    nvme_paths: tuple[str, ...] = ()
    num_replicas: int = 1
    num_shards: int | None = None
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel_size: int = 1
    use_cpu: bool = False
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Strategy:
        """The properties of the strategy."""
        return strategy_named(self.name)

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed runs the training step."""
        return self.kind.is_deepspeed

    @property
    def is_fsdp(self) -> bool:
        """True if FSDP, of either version, shards the model."""
        return self.kind.is_fsdp

    @property
    def saves_whole_checkpoints(self) -> bool:
        """True if FSDP gathers weights and optimizer states on rank 0 for every checkpoint."""
        return self.is_fsdp and str(self.fsdp.get("fsdp_state_dict_type")) == "FULL_STATE_DICT"

    @property
    def label(self) -> str:
        """Its name in tables: ``FSDP2 hybrid, 2 × 2``, ``FSDP2 × TP 2``, ``ZeRO-3, NVMe offload``, ``DDP``."""
        text = "one CPU process" if self.kind.is_single and self.use_cpu else self.kind.label
        if self.num_replicas > 1:
            text += f" hybrid, {self.num_replicas} replicas × {self.num_shards} shards"
        ring = self.context_parallel_size // self.sequence_parallel_size
        shared = {"TP": self.tensor_parallel_size, "SP": self.sequence_parallel_size, "CP": ring}
        degrees = [f"{name} {size}" for name, size in shared.items() if size > 1]
        text = " × ".join(degrees if degrees and self.num_shards == 1 else [text, *degrees])
        offload = {self.offload_optimizer, self.offload_params} - {"none"}
        if offload:
            text += f", {'NVMe' if 'nvme' in offload else 'CPU'} offload"
        return text


def is_true(value: object) -> bool:
    """The truth value of a flag as spelled by YAML, JSON or an environment variable."""
    return str(value).lower() in _TRUE


def launch_strategy(values: Mapping[str, Any], deepspeed: Mapping[str, Any]) -> LaunchStrategy:
    """The strategy in a launch file's top-level `values`, with DeepSpeed's configuration resolved."""
    kind = values.get("distributed_type", "NO")
    sizes = values.get("parallelism_config") or {}
    # `accelerate launch` passes this section of a file to every launch of several processes.
    size = {
        name: int(sizes.get(f"parallelism_config_{name}_size", 1) or 1) if kind != "NO" else 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    shared: dict[str, Any] = {
        "tensor_parallel_size": size["tp"],
        "context_parallel_size": max(size["cp"], size["sp"]),
        "sequence_parallel_size": size["sp"],
    }
    if kind == "FSDP":
        fsdp = {
            k if str(k).startswith("fsdp") else f"fsdp_{k}": v for k, v in (values.get("fsdp_config") or {}).items()
        }
        offload = "cpu" if is_true(fsdp.get("fsdp_offload_params", False)) else "none"
        # accelerate's own default is version 1.
        name = strategy_named(f"fsdp{fsdp.get('fsdp_version', 1)}").name
        shared |= {"num_replicas": size["dp_replicate"], "num_shards": size["dp_shard"] if sizes else None}
        return LaunchStrategy(name, offload_optimizer=offload, offload_params=offload, fsdp=fsdp, **shared)
    if kind == "DEEPSPEED":
        return replace(_deepspeed_strategy(deepspeed), **shared)
    if kind == "MEGATRON_LM":
        return LaunchStrategy("megatron")
    if kind.startswith("MULTI_") and kind != "MULTI_CPU":
        return LaunchStrategy("ddp" if values.get("num_processes") != 1 else "single", **shared)
    # MULTI_CPU starts several processes through MPI only.
    if kind == "MULTI_CPU" and (values.get("mpirun_config") or {}):
        return LaunchStrategy("ddp")
    return LaunchStrategy("single", use_cpu=is_true(values.get("use_cpu", False)) or kind == "MULTI_CPU")


def _deepspeed_strategy(config: Mapping[str, Any]) -> LaunchStrategy:
    zero = config.get("zero_optimization") or {}
    devices, paths = {}, []
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) or {}
        devices[name] = str(section.get("device") or "none")
        if devices[name] == "nvme" and section.get("nvme_path"):
            paths.append(str(section["nvme_path"]))
    return LaunchStrategy(
        strategy_named(f"zero{zero.get('stage', 0)}").name,
        offload_optimizer=devices["offload_optimizer"],
        offload_params=devices["offload_param"],
        nvme_paths=tuple(dict.fromkeys(paths)),
        deepspeed=config,
    )


def deepspeed_config_of(section: Mapping[str, Any], file: SourceFile | None) -> dict[str, Any]:
    """DeepSpeed's configuration as Accelerate's `DeepSpeedPlugin` builds it: its file's, else from the plain keys."""
    if file is not None:
        return file.values
    if not section:
        return {}
    return {
        "gradient_accumulation_steps": section.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": section.get("gradient_clipping", "auto"),
        "zero_optimization": {
            "stage": int(section.get("zero_stage", 2)),
            **{
                name: {"device": section.get(f"{name}_device", "none"), "nvme_path": section.get(f"{name}_nvme_path")}
                for name in ("offload_optimizer", "offload_param")
            },
            "stage3_gather_16bit_weights_on_model_save": section.get("zero3_save_16bit_model", False),
        },
    }


def relative_to(folder: Path, name: str) -> Path:
    """`name` relative to `folder`."""
    return Path(name) if Path(name).is_absolute() else folder / name
