"""How a model is trained: the settings that memory and time depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import POLICY_CHOICES, SEGMENTS, kind_of, layers_at_once, number_in
from accel_scale.facts.device import ATTENTION_NAMES, PACKED_ATTENTION
from accel_scale.facts.loss_chunks import CARD_LOGITS
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import FUSED_PARTS, METHODS, PIPELINE_SCHEDULES, PRECISIONS
from accel_scale.facts.precisions import DTYPE_BYTES, PRECISION_FACTS, REDUCE_DTYPES
from accel_scale.facts.strategies import OFFLOADS, STRATEGIES
from accel_scale.planning.models.parallel_setup import ParallelSetup as ParallelSetup
from accel_scale.units import format_bytes

ATTENTIONS = tuple(name for name in ATTENTION_NAMES if name != PACKED_ATTENTION)  # that one counts as sdpa
REFERENCE_PASSES = ("none", "before", "within")
LOSSES = ("full", "full_compiled", "chunked", "liger", "log_probs", "chunked_logits")


@dataclass(frozen=True)
class LoraSetup:
    """Low-rank adapters.

    Attributes:
        rank: r of the update B·A.
        targets: Last module names that get an adapter, or ``("all-linear",)``: every linear but the head.
        dora: Whether a magnitude vector per output is learned.
        full_modules: Modules trained in full besides them (PEFT's ``modules_to_save``), e.g. ``embed_tokens``.
        dropout: Probability with which an adapter's inputs are dropped; each adapter then keeps a copy of them.
    """

    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    full_modules: tuple[str, ...] = ()
    dropout: float = 0.0


@dataclass(frozen=True)
class GenerationSetup:
    """Answers that the model writes before it is trained on them, by transformers' ``generate``.

    Attributes:
        rows: Number of answers that a rank writes at the same time.
        prompt_length: Tokens of the longest prompt.
        completion_length: Maximum number of tokens in an answer.
    """

    rows: int
    prompt_length: int
    completion_length: int

    @property
    def total_length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_length + self.completion_length


@dataclass(frozen=True)
class VllmSetup:
    """vLLM, which writes the answers of a `GenerationSetup` instead of transformers.

    Attributes:
        held_bytes: Memory that it holds on each training card, weights and cache; 0: it is a server elsewhere.
        sleeps: Whether it releases that memory while the model trains.
        tensor_parallel: Number of cards that share its weights.
    """

    held_bytes: float = 0.0
    sleeps: bool = False
    tensor_parallel: int = 1

    def refuse_weights(self, num_params: float) -> None:
        """Refuse a share of the card that 16-bit weights alone would fill.

        Raises:
            ConfigError: naming both sizes.
        """
        weights = 2 * num_params / self.tensor_parallel
        if 0 < self.held_bytes <= weights:
            raise ConfigError(
                f"vLLM's share of the card, {format_bytes(self.held_bytes)}, does not hold its weights, "
                f"{format_bytes(weights)}, and a cache.",
                place="--vllm_gpu_memory_utilization",
                fix="raise it, or --vllm_tensor_parallel_size, or use --vllm_mode server.",
            )


@dataclass(frozen=True)
class TrainingSetup:
    """One way to train, validated on creation.

    Attributes:
        method: ``full``, ``lora`` or ``qlora``.
        precision: ``fp32``; ``fp16`` and ``bf16`` (mixed: trained weights fp32, products under autocast);
            ``bf16_true``; ``fp8`` (torchao on bf16 mixed).
        optimizer: A value of ``--optim``.
        checkpointing: A value of ``--checkpointing_policy``.
        long_rows: Whether MLPs and norms run over slices of the rows.
        fused: Parts of the model that run in fused kernels, out of `FUSED_PARTS`.
        attention: A value of ``--attn_implementation``.
        loss: ``full`` logits, ``full_compiled`` (whole logits, their loss in one compiled kernel), ``chunked`` (this
            project's head and loss), ``liger``, ``log_probs`` (TRL's, of every token, in tiles) or
            ``chunked_logits`` (torchtune's: whole logits, their loss in eight chunks).
        chunk_logits: Logits of a frozen head that ``chunked`` holds at once on a GPU: `card_logits` of its memory.
        micro_batch_size: Rows per rank and forward pass.
        sequence_length: Tokens per row: the longest row of a batch when padded, the row when packed.
        packing: Whether rows are filled with several documents.
        mean_length: Average tokens per row that are not padding; `None`: all.
        accumulation: Micro-batches per optimizer step.
        sync_each_batch: Whether FSDP2 reduces and shards gradients after every micro-batch. Otherwise they stay whole
            on every rank until a step's last micro-batch, and are reduced once.
        reduce_dtype: A value of ``--reduce_dtype``; None: the engine's own.
        lora: The adapters, for ``lora`` and ``qlora``.
        double_quantisation: Whether QLoRA also quantises its constants.
        compile: Whether layers go through torch.compile.
        weight_dtype: Dtype of trained weights, if not `precision`'s (``bfloat16`` under autocast, for instance).
        frozen_dtype: Dtype of frozen weights, if not the compute dtype.
        reference_model: Whether a frozen copy of the model also does a forward pass on every micro-batch.
        reference_pass: When the reference, a copy or the base without adapters, does its forward pass: ``none``,
            ``before`` a step's passes, or ``within`` them, while the graph of a micro-batch is kept.
        kl_rows: Whether as many rows again, prompts with other rows' answers, are scored in a micro-batch without
            gradients, by the model and by its reference if there is one: KTO's KL term.
        generation: Answers written before a step; None without generation.
        vllm: vLLM, if it writes the answers instead of transformers.
        quantises_whole: Whether every card holds a whole 4-bit base before it is sharded, as transformers loads it.
        expandable_segments: Whether torch's allocator extends its segments, so that it hoards no blocks.
        steps_in_backward: Whether each parameter is updated as soon as its gradient is ready, which is then freed.
        keeps_quantised_inputs: Whether nodes of 4-bit products keep their inputs as long as a graph exists
            (bitsandbytes before 0.44), in a loop that names its loss, and so keeps the graph before, until the next.
        keeps_every: Under ``selective``, every n-th product of a layer's linears is kept (torchtitan: every second).
        flat_blocks: Whether FSDP1 puts frozen and trained weights of a layer in one flat parameter, which has one
            gradient for both.
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
    chunk_logits: int = CARD_LOGITS
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
    reference_pass: str = "none"
    kl_rows: bool = False
    generation: GenerationSetup | None = None
    vllm: VllmSetup | None = None
    quantises_whole: bool = True
    expandable_segments: bool = False
    steps_in_backward: bool = False
    keeps_quantised_inputs: bool = False
    keeps_every: int = 1
    flat_blocks: bool = False
    parallel: ParallelSetup = field(default_factory=ParallelSetup)

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("precision", self.precision, PRECISIONS)
        _choice("attention", self.attention, ATTENTIONS)
        _choice("loss", self.loss, LOSSES)
        _choice("reference_pass", self.reference_pass, REFERENCE_PASSES)
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
        for name in (*names, "tensor_parallel", "pipeline_parallel", "sequence_parallel", "stream_ranks"):
            _positive(name, getattr(parallel, name))
        parallel.check_degrees()

    @property
    def least_rows(self) -> int:
        """Minimum rows of a micro-batch: other rows' answers need another row."""
        return 2 if self.kl_rows else 1

    @property
    def scoring_passes(self) -> int:
        """Number of forward passes per micro-batch without gradients, for a reference and for the KL term."""
        has_reference = self.reference_model or self.reference_pass != "none"
        return has_reference + self.kl_rows * (1 + has_reference)

    @property
    def is_padded(self) -> bool:
        """True if rows differ in length."""
        return not self.packing and self.mean_length is not None and self.mean_length < self.sequence_length

    @property
    def trains_adapters(self) -> bool:
        """True if adapters are trained on a frozen base."""
        return METHOD_FACTS[self.method].trains_adapters

    @property
    def needs_reentrant(self) -> bool:
        """True if only reentrant activation checkpointing works with the strategy and the method."""
        return self.parallel.kind.needs_reentrant(adapters=self.trains_adapters)

    @property
    def trains_all(self) -> bool:
        """True if every weight is trained."""
        return not self.trains_adapters

    @property
    def quantises_base(self) -> bool:
        """True if the frozen base is stored in 4 bits."""
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
        """Bytes per value of the inputs of matrix products."""
        return DTYPE_BYTES[PRECISION_FACTS[self.precision].compute]

    @property
    def reduce_bytes(self) -> int | None:
        """Bytes per value of a reduced gradient; None: the engine's own."""
        return DTYPE_BYTES[REDUCE_DTYPES[self.reduce_dtype]] if self.reduce_dtype is not None else None

    @property
    def autocast(self) -> bool:
        """True if autocast runs matrix products in another dtype than the weights'."""
        return PRECISION_FACTS[self.precision].autocast is not None

    @property
    def trained_bytes(self) -> int:
        """Bytes per trained weight (and gradient) without DeepSpeed, which keeps 16-bit weights and fp32 masters."""
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
    """Number of layers after which the checkpointing policy repeats."""
    return number_in(setup.checkpointing)[1]


def with_segments(setup: TrainingSetup, num_layers: int) -> TrainingSetup:
    """`setup` with the size of its segments in the name of its policy, if the policy leaves the size to the model."""
    if setup.checkpointing != SEGMENTS:
        return setup
    return replace(setup, checkpointing=f"{SEGMENTS}_{layers_at_once(SEGMENTS, num_layers)}")


def check_policy(setup: TrainingSetup) -> None:
    """Refuse an unknown checkpointing policy.

    Raises:
        ConfigError: naming the known policies.
    """
    if kind_of(setup.checkpointing) is None:
        raise ConfigError(
            f"{setup.checkpointing!r} is not a checkpointing policy.",
            place="checkpointing",
            fix=f"use {POLICY_CHOICES}.",
        )
