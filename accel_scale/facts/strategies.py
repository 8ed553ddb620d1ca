"""Strategies for distributing a run over processes: properties for launch files, training, planner and doctor.

To add one, write its launch file and an entry in `STRATEGIES` if it is a new way to run a step, or in `VARIANTS` if it
is a known one with other settings. Code checks properties and never compares names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from accel_scale.errors import ConfigError
from accel_scale.facts.zero_buffers import DEEPSPEED_BUFFERS, TUNED_BUFFERS, ZeroBuffers

Engine = Literal["none", "ddp", "fsdp", "deepspeed", "megatron", "model_parallel"]
Offload = Literal["none", "cpu", "nvme"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)


class Refusal(NamedTuple):
    """Why something does not work in a given place, and what to use instead."""

    reason: str
    fix: str


@dataclass(frozen=True)
class Strategy:
    """One way to distribute weights, gradients and optimizer states over processes.

    Attributes:
        name: Name in manifests, flags and messages.
        label: Name in tables.
        engine: What runs the backward pass and the step.
        fsdp_version: Version of FSDP, if it is used.
        zero_stage: Stage of DeepSpeed's ZeRO, if it is used.
        shards_states: Whether optimizer states are sharded.
        shards_gradients: Whether gradients are sharded.
        shards_weights: Whether weights are sharded, so that each layer's weights are gathered before it runs.
        overlaps: Whether communication overlaps with computation.
        reduces_each_batch: Whether gradients can be reduced after every micro-batch, not only after a step's last.
        is_planned: Whether the planner models the strategy.
        refused_precisions: Name of a precision → why it does not work.
    """

    name: str
    label: str
    engine: Engine
    fsdp_version: int | None = None
    zero_stage: int | None = None
    shards_states: bool = False
    shards_gradients: bool = False
    shards_weights: bool = False
    overlaps: bool = True
    reduces_each_batch: bool = False
    is_planned: bool = True
    refused_precisions: Mapping[str, Refusal] = field(default_factory=dict)

    @property
    def is_single(self) -> bool:
        """True for a single process."""
        return self.engine == "none"

    @property
    def is_ddp(self) -> bool:
        """True if DDP reduces whole gradients."""
        return self.engine == "ddp"

    @property
    def is_fsdp(self) -> bool:
        """True if either version of FSDP shards the model."""
        return self.engine == "fsdp"

    @property
    def is_fsdp2(self) -> bool:
        """True if FSDP2 shards the model, so that parameters are DTensors."""
        return self.fsdp_version == 2

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed runs the step."""
        return self.engine == "deepspeed"

    @property
    def is_model_parallel(self) -> bool:
        """True if the ranks share the model by this project's tensor, pipeline or sequence parallelism."""
        return self.engine == "model_parallel"

    @property
    def is_replicated(self) -> bool:
        """True if every process holds everything, so that a checkpoint of one such strategy loads under another."""
        return self.is_single or self.is_ddp

    @property
    def partitions_weights(self) -> bool:
        """True if DeepSpeed partitions weights (ZeRO-3), gathering them around every module's forward."""
        return self.is_deepspeed and self.shards_weights

    def needs_reentrant(self, *, adapters: bool) -> bool:
        """True if activation checkpointing must be reentrant: ZeRO-3 partitions an adapter's frozen base again during
        recomputation, where torch's other kind compares shapes with those of the forward pass."""
        return self.partitions_weights and adapters

    @property
    def engine_label(self) -> str:
        """Name of what runs the step, for messages."""
        return "DeepSpeed" if self.is_deepspeed else self.label

    @property
    def family(self) -> str:
        """The name used in optimizers' refusals: ``ddp``, ``fsdp``, ``zero`` …"""
        return "zero" if self.is_deepspeed else self.engine

    def loads_checkpoints_of(self, name: str) -> bool:
        """True if weights and states saved under the strategy `name` load under this one."""
        other = STRATEGIES.get(name)
        # Ranks that share a model save every tensor whole, under its name in the undivided model.
        stores_whole = other is not None and (other.is_replicated or other.is_model_parallel)
        return name == self.name or (self.is_replicated and stores_whole)


_OTHER_PRECISION = "use --precision bf16, or a DDP or FSDP2 launch file."
_REFUSED_BY_DEEPSPEED = {
    "bf16_true": Refusal(
        "DeepSpeed keeps fp32 master weights beside bf16 ones, so bf16_true is not possible with it",
        _OTHER_PRECISION,
    ),
    "fp8": Refusal("fp8 layers are not supported under DeepSpeed", _OTHER_PRECISION),
}


def _zero(stage: int, *, is_planned: bool = True) -> Strategy:
    """A ZeRO stage: shards states from 1 on, gradients from 2, weights from 3 (Rajbhandari et al. 2020, section 3)."""
    return Strategy(
        f"zero{stage}",
        f"ZeRO-{stage}",
        "deepspeed",
        zero_stage=stage,
        shards_states=stage >= 1,
        shards_gradients=stage >= 2,
        shards_weights=stage >= 3,
        overlaps=stage < 3,
        is_planned=is_planned,
        refused_precisions=_REFUSED_BY_DEEPSPEED,
    )


def _fsdp(version: int, *, reduces_each_batch: bool) -> Strategy:
    return Strategy(
        f"fsdp{version}",
        f"FSDP{version}",
        "fsdp",
        fsdp_version=version,
        shards_states=True,
        shards_gradients=True,
        shards_weights=True,
        reduces_each_batch=reduces_each_batch,
    )


_ALL = (
    Strategy("single", "one process", "none"),
    Strategy("ddp", "DDP", "ddp"),
    _fsdp(1, reduces_each_batch=False),
    _fsdp(2, reduces_each_batch=True),
    _zero(0, is_planned=False),
    _zero(1),
    _zero(2),
    _zero(3),
    Strategy("megatron", "Megatron-LM", "megatron", is_planned=False),
    # Model sharing between the ranks of a plain loop, beside FSDP2 or DDP; no launch file names it.
    Strategy("model_parallel", "model parallelism", "model_parallel", is_planned=False),
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _ALL}


def strategy_named(name: str) -> Strategy:
    """The strategy called `name`.

    Raises:
        ConfigError: if there is none.
    """
    if name not in STRATEGIES:
        raise ConfigError(
            f"{name!r} is not a strategy.", place="launch file", fix=f"use one of {', '.join(STRATEGIES)}."
        )
    return STRATEGIES[name]


class Offloading:
    """Properties derived from where weights and optimizer states live, for dataclasses with these two fields."""

    offload_params: str
    offload_optimizer: str

    @property
    def offloads_params(self) -> bool:
        """True if weights live in host memory or on NVMe."""
        return self.offload_params != "none"

    @property
    def offloads_optimizer(self) -> bool:
        """True if optimizer states live in host memory or on NVMe."""
        return self.offload_optimizer != "none"

    @property
    def offloads(self) -> bool:
        """True if weights or optimizer states are offloaded."""
        return self.offloads_params or self.offloads_optimizer


@dataclass(frozen=True)
class StrategyVariant:
    """A strategy with its settings, as the planner compares them and this project's launch files set them.

    Attributes:
        label: Name in tables.
        strategy: A name in `STRATEGIES`.
        launch_file: Name of its file in ``accelerate_configs/``, without the suffix.
        offload_params: Where weights live when not on the card.
        offload_optimizer: Where optimizer states live when not on the card.
        reshard_after_forward: Whether gathered weights are freed after the forward pass.
        for_one_gpu: Whether it is useful on a single GPU.
        zero: Sizes of DeepSpeed's buffers.
        is_open: Whether the planner considers it when no strategy is named.
    """

    label: str
    strategy: str
    launch_file: str
    offload_params: Offload = "none"
    offload_optimizer: Offload = "none"
    reshard_after_forward: bool = True
    for_one_gpu: bool = False
    zero: ZeroBuffers = DEEPSPEED_BUFFERS
    is_open: bool = True


# From the simplest to the last resort: nothing sharded first, then growing stages.
VARIANTS: tuple[StrategyVariant, ...] = (
    StrategyVariant("DDP", "ddp", "ddp"),
    StrategyVariant("ZeRO-1", "zero1", "zero1"),
    StrategyVariant("FSDP2 SHARD_GRAD_OP", "fsdp2", "fsdp2_grad_op", reshard_after_forward=False),
    StrategyVariant("ZeRO-2", "zero2", "zero2"),
    StrategyVariant("FSDP2", "fsdp2", "fsdp2"),
    StrategyVariant("ZeRO-3", "zero3", "zero3"),
    StrategyVariant("FSDP2 + CPU offload", "fsdp2", "fsdp2_offload", "cpu", "cpu"),
    StrategyVariant("ZeRO-2 + CPU offload", "zero2", "zero2_offload", "none", "cpu", for_one_gpu=True),
    StrategyVariant("ZeRO-3 + CPU offload", "zero3", "zero3_offload", "cpu", "cpu", for_one_gpu=True),
    StrategyVariant("ZeRO-Infinity", "zero3", "zero_infinity", "nvme", "nvme", for_one_gpu=True),
    StrategyVariant("ZeRO-2 tuned", "zero2", "zero2_tuned", zero=TUNED_BUFFERS, is_open=False),
    StrategyVariant("ZeRO-3 tuned", "zero3", "zero3_tuned", zero=TUNED_BUFFERS, is_open=False),
)
ONE_GPU, HYBRID = "one GPU", "FSDP2 hybrid"
# Labels of launch files, and of common names for them, where the label is not just another spelling of the name.
LAUNCH_FILE_LABELS: dict[str, str] = {
    "single": ONE_GPU,
    "single_gpu": ONE_GPU,
    "fsdp2_hybrid": HYBRID,
    **{variant.launch_file: variant.label for variant in VARIANTS},
}
