"""How a model is trained: the settings that memory and time depend on."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.device import ATTENTION_NAMES, PACKED_ATTENTION
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import FUSED_PARTS, METHODS, PIPELINE_SCHEDULES, PRECISIONS
from accel_scale.facts.precisions import DTYPE_BYTES, PRECISION_FACTS, REDUCE_DTYPES
from accel_scale.facts.strategies import OFFLOADS, STRATEGIES, Offloading, Strategy, strategy_named

_EVERY_LAYERS = re.compile(r"every_([0-9]+)")
_CHECKPOINTING = ("none", "full", "selective", "attention", "mlp", "offload")

ATTENTIONS = tuple(name for name in ATTENTION_NAMES if name != PACKED_ATTENTION)  # that one counts as sdpa
LOSSES = ("full", "chunked", "liger")


@dataclass(frozen=True)
class LoraSetup:
    """Low-rank adapters.

    Attributes:
        rank: r of the update B·A.
        targets: Last module names that get one, or ``("all-linear",)``: every linear but the head.
        dora: Whether a magnitude vector per output is learned.
        full_modules: Modules trained whole beside them (PEFT's ``modules_to_save``), e.g. ``embed_tokens``.
        dropout: Probability with which an adapter's inputs are dropped; each adapter then keeps a copy of them.
    """

    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    full_modules: tuple[str, ...] = ()
    dropout: float = 0.0


@dataclass(frozen=True)
class ParallelSetup(Offloading):
    """How the ranks share the work.

    Attributes:
        strategy: A name of `facts.strategies` that can be planned.
        num_gpus: All ranks.
        gpus_per_node: Ranks that share a node's links.
        num_replicas: Groups that each hold all shards (hybrid sharding); 1: shards over all data-parallel ranks.
        reshard_after_forward: Whether FSDP frees gathered weights after the forward pass (FULL_SHARD).
        offload_optimizer: Where optimizer states live when not on the card.
        offload_params: Where weights live when not on the card.
        tensor_parallel: Ranks that share each matrix product.
        pipeline_parallel: Stages that the layers are split into.
        sequence_parallel: Ranks that share each sequence (Ulysses).
        pipeline_schedule: One of `PIPELINE_SCHEDULES`.
        stages_per_rank: Stages that each rank of a pipeline holds.
        in_engine: Whether the engine has the whole model and takes the ranks of a sequence for data-parallel ones, as
            in the fine-tuning recipe; else the recipe divides the model itself.
    """

    strategy: str = "single"
    num_gpus: int = 1
    gpus_per_node: int = 8
    num_replicas: int = 1
    reshard_after_forward: bool = True
    offload_optimizer: str = "none"
    offload_params: str = "none"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: int = 1
    pipeline_schedule: str = "1f1b"
    stages_per_rank: int = 1
    in_engine: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether the recipe itself divides the model among ranks."""
        return self.model_parallel > 1 and not self.in_engine

    @property
    def model_parallel(self) -> int:
        """Ranks that see the same sequences, or parts of them."""
        return self.tensor_parallel * self.pipeline_parallel * self.sequence_parallel

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Of tensor, pipeline and sequence parallelism."""
        return self.tensor_parallel, self.pipeline_parallel, self.sequence_parallel

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.num_gpus // self.model_parallel

    @property
    def num_shards(self) -> int:
        """Ranks that one copy of sharded states is spread over. Ranks of one sequence share shards too."""
        return self.data_parallel * self.sequence_parallel // self.num_replicas

    @property
    def kind(self) -> Strategy:
        """The strategy's own properties."""
        return strategy_named(self.strategy)

    @property
    def can_sync_each_batch(self) -> bool:
        """Whether gradients of every micro-batch can be reduced and sharded, which saves memory."""
        return self.kind.reduces_each_batch and not self.is_divided

    @property
    def shards_states(self) -> bool:
        """Whether optimizer states are spread."""
        return self.kind.shards_states

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are spread."""
        return self.kind.shards_gradients

    @property
    def shards_weights(self) -> bool:
        """Whether weights are spread."""
        return self.kind.shards_weights

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed runs the step."""
        return self.kind.is_deepspeed


@dataclass(frozen=True)
class TrainingSetup:
    """One way to train; validated when made.

    Attributes:
        method: ``full``, ``lora`` or ``qlora``.
        precision: ``fp32``; ``fp16`` and ``bf16`` (mixed: trained weights fp32, products under autocast);
            ``bf16_true``; ``fp8`` (torchao on bf16 mixed).
        optimizer: A name of ``--optim``.
        checkpointing: A name of ``--checkpointing_policy``.
        long_rows: Whether MLPs and norms run over slices of the rows.
        fused: Parts of the model that run in Liger's kernels, of `FUSED_PARTS`.
        attention: A name of ``--attn_implementation``.
        loss: ``full`` logits, ``chunked`` (this project's head and loss) or ``liger``.
        micro_batch_size: Rows per rank and forward pass.
        sequence_length: Tokens per row: the longest row of a batch when padded, the row when packed.
        packing: Whether rows are filled with several documents.
        mean_length: Tokens that are no padding, on average per row; `None`: all.
        accumulation: Micro-batches per optimizer step.
        sync_each_batch: Whether FSDP2 reduces and shards the gradients of every micro-batch. Else those of all but a
            step's last wait whole on every rank, and are reduced once.
        reduce_dtype: Of ``--reduce_dtype``; None: the engine's own.
        lora: The adapters, for ``lora`` and ``qlora``.
        double_quantisation: Whether QLoRA quantises its constants too.
        compile: Whether layers go through torch.compile.
        weight_dtype: Trained weights, where not what `precision` says (``bfloat16`` under autocast, for instance).
        frozen_dtype: Frozen weights, where not the compute dtype.
        reference_model: Whether a frozen copy of the model does a forward pass on every micro-batch too.
        parallel: How ranks share the work.
    """

    method: str = "full"
    precision: str = "bf16"
    optimizer: str = "adamw_torch_fused"
    checkpointing: str = "full"
    long_rows: bool = False
    fused: tuple[str, ...] = ()
    attention: str = "sdpa"
    loss: str = "chunked"
    micro_batch_size: int = 1
    sequence_length: int = 1024
    packing: bool = True
    mean_length: float | None = None
    accumulation: int = 1
    sync_each_batch: bool = False
    reduce_dtype: str | None = None
    lora: LoraSetup = LoraSetup()
    double_quantisation: bool = True
    compile: bool = False
    weight_dtype: str | None = None
    frozen_dtype: str | None = None
    reference_model: bool = False
    parallel: ParallelSetup = ParallelSetup()

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("precision", self.precision, PRECISIONS)
        _choice("attention", self.attention, ATTENTIONS)
        _choice("loss", self.loss, LOSSES)
        for part in self.fused:
            _choice("fused", part, FUSED_PARTS)
        for name in ("micro_batch_size", "sequence_length", "accumulation"):
            _positive(name, getattr(self, name))
        _positive("lora rank", self.lora.rank)
        self._check_parallel()

    def _check_parallel(self) -> None:
        parallel = self.parallel
        _choice("strategy", parallel.strategy, tuple(name for name, kind in STRATEGIES.items() if kind.is_planned))
        _choice("offload_optimizer", parallel.offload_optimizer, OFFLOADS)
        _choice("offload_params", parallel.offload_params, OFFLOADS)
        _choice("pipeline_schedule", parallel.pipeline_schedule, PIPELINE_SCHEDULES)
        names = ("num_gpus", "gpus_per_node", "num_replicas", "stages_per_rank")
        for name in (*names, "tensor_parallel", "pipeline_parallel", "sequence_parallel"):
            _positive(name, getattr(parallel, name))
        degrees = parallel.model_parallel
        if parallel.num_gpus % (degrees * parallel.num_replicas):
            raise ConfigError(
                f"{parallel.num_gpus} GPUs do not divide into {degrees} model-parallel ranks × "
                f"{parallel.num_replicas} replicas.",
                fix="choose degrees whose product divides the number of GPUs.",
            )

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters learn on a frozen base."""
        return METHOD_FACTS[self.method].trains_adapters

    @property
    def trains_all(self) -> bool:
        """Whether every weight learns."""
        return not self.trains_adapters

    @property
    def quantises_base(self) -> bool:
        """Whether the frozen base is stored in 4 bits."""
        return METHOD_FACTS[self.method].quantises_base

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batch_size * self.accumulation * self.parallel.data_parallel

    @property
    def tokens_per_step(self) -> int:
        """Positions per optimizer step over all ranks, padding included."""
        return self.global_batch_size * self.sequence_length

    @property
    def compute_bytes(self) -> int:
        """Bytes per value of matrix products' inputs."""
        return DTYPE_BYTES[PRECISION_FACTS[self.precision].compute]

    @property
    def reduce_bytes(self) -> int | None:
        """Bytes per value of a gradient that is reduced; None: as the engine has it."""
        return DTYPE_BYTES[REDUCE_DTYPES[self.reduce_dtype]] if self.reduce_dtype is not None else None

    @property
    def autocast(self) -> bool:
        """Whether weights and products differ in dtype by autocast."""
        return PRECISION_FACTS[self.precision].autocast is not None

    @property
    def trained_bytes(self) -> int:
        """Bytes per trained weight (and gradient) outside of DeepSpeed, which keeps 16-bit ones and fp32 masters."""
        return DTYPE_BYTES[self.weight_dtype or PRECISION_FACTS[self.precision].weights]

    @property
    def frozen_bytes(self) -> int:
        """Bytes per frozen weight that is not quantised."""
        return DTYPE_BYTES[self.frozen_dtype] if self.frozen_dtype else self.compute_bytes


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{value!r} is not a {name}.", place=name, fix=f"use one of {', '.join(choices)}.")


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value!r}.", place=name, fix="give a positive number.")


def period_of(setup: TrainingSetup) -> int:
    """Of how many layers one is checkpointed."""
    match = _EVERY_LAYERS.fullmatch(setup.checkpointing)
    return int(match.group(1)) if match else 1


def check_policy(setup: TrainingSetup) -> None:
    """Refuse what is no policy.

    Raises:
        ConfigError: with those that there are.
    """
    policy = setup.checkpointing
    if policy not in _CHECKPOINTING and not (_EVERY_LAYERS.fullmatch(policy) and period_of(setup)):
        raise ConfigError(
            f"{policy!r} is not a checkpointing policy.",
            place="checkpointing",
            fix="use none, full, every_2 (or any every_n), selective, attention, mlp or offload.",
        )
