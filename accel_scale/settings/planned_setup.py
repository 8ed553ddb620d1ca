"""Translate a recipe's settings, launch and machine to the planner's terms."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts import hardware
from accel_scale.facts.device import PACKED_ATTENTION
from accel_scale.facts.loss_chunks import CARD_LOGITS, card_logits
from accel_scale.facts.zero_buffers import zero_buffers
from accel_scale.launching.memory_cap import extends_segments
from accel_scale.planning.models.training_setup import (
    GenerationSetup,
    LoraSetup,
    ParallelSetup,
    TrainingSetup,
    VllmSetup,
)
from accel_scale.planning.search.preferences import PROMPT_TOKENS, reference_of_rewards
from accel_scale.settings.trl_refused import flag_of_whole_logits
from accel_scale.units import parse_bytes

if TYPE_CHECKING:
    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.launching.strategy import LaunchStrategy
    from accel_scale.parallel.layout import ParallelLayout
    from accel_scale.settings.resolved import Resolved
    from accel_scale.settings.trl_config import RecipeModelConfig

# Flags of `GRPOConfig` that change memory use → what about each is not modelled.
_UNPLANNED_REWARDS = {
    "use_transformers_continuous_batching": "the cache of continuous batching is",
    "cast_lm_head_to_fp32": "a head in fp32 is",
    "sync_ref_model": "a reference that follows the model is",
}


@dataclass(frozen=True)
class Target:
    """The machine that a run is planned for.

    Attributes:
        machine: Its cards; without one, this machine's memory takes the place of a card's.
        is_cuda: Whether CUDA kernels will run.
        is_here: Whether this is the machine that the run will use.
    """

    machine: hardware.Machine
    is_cuda: bool
    is_here: bool

    @property
    def logits_here(self) -> int:
        """Logits that the chunked loss holds at once on the card that the run will use."""
        machine = self.machine if self.is_here else hardware.detect_local()
        return card_logits(machine.gpu.memory_bytes) if machine is not None else CARD_LOGITS


@dataclass(frozen=True)
class SharedModel:
    """How the ranks of a run share its model.

    Attributes:
        layout: The sizes of all kinds of parallelism.
        schedule: Schedule of a pipeline.
        stages_per_rank: Stages of a pipeline on each rank.
    """

    layout: ParallelLayout
    schedule: str = "1f1b"
    stages_per_rank: int = 1


def target_of(settings: Resolved, launch: LaunchEnvironment) -> Target:
    """The card of ``--plan_gpu``, else the one here, else this machine's memory; ``--device_memory`` caps it.

    Raises:
        ConfigError: for an unknown card.
    """
    scale, is_cuda = settings.scale, settings.launch.device_type == "cuda"
    host_bytes = hardware.host_memory_bytes()
    local = hardware.detect_local() if is_cuda and not scale.plan_gpu else None
    if scale.plan_gpu:
        gpu = hardware.find_gpu(scale.plan_gpu, place=settings.sources.get("plan_gpu", "--plan_gpu"))
    elif local is not None:
        gpu = local.gpu
    else:
        share = (host_bytes or 0) // max(1, launch.local_world_size)
        gpu = hardware.Gpu("this machine's memory", share, share)
    if scale.device_memory:
        cap = parse_bytes(scale.device_memory, place=settings.sources.get("device_memory", "--device_memory"))
        if cap < gpu.memory_bytes:
            gpu = replace(gpu, name=f"{gpu.name}, capped", memory_bytes=cap, usable_bytes=min(cap, gpu.usable_bytes))
    machine = hardware.Machine(
        gpu,
        num_gpus=launch.world_size,
        gpus_per_node=launch.local_world_size,
        host_memory_bytes=host_bytes if local is not None else None,
    )
    return Target(machine, is_cuda=is_cuda or bool(scale.plan_gpu), is_here=not scale.plan_gpu)


def setup_of(
    settings: Resolved,
    launch: LaunchEnvironment,
    attention: str,
    shared: SharedModel | None = None,
    *,
    card_bytes: float = 0.0,
) -> TrainingSetup:
    """A recipe's settings in the planner's terms.

    Args:
        card_bytes: Memory of a card, a share of which the loss and vLLM take.

    Raises:
        ConfigError: for anything that the planner does not model: an 8-bit base, adapters by pattern, rows of unknown
            length.
    """
    from accel_scale.settings.trl_config import RecipeModelConfig

    model_args = settings.build(RecipeModelConfig)
    if model_args.load_in_8bit:
        raise ConfigError("memory of an 8-bit base is not modelled.", place="--load_in_8bit")
    length_flag = "max_completion_length" if settings.recipe.generates else "max_length"
    length = recipe_value(settings, length_flag)
    if length is None:
        raise ConfigError(f"without --{length_flag} rows can have any length.", place=f"--{length_flag}")
    rows = _of_rows(settings, launch, attention, model_args, int(length), shared)
    if card_bytes:
        rows = replace(rows, chunk_logits=card_logits(card_bytes))
    return _of_rewards(settings, rows, card_bytes)


def _of_rows(
    settings: Resolved,
    launch: LaunchEnvironment,
    attention: str,
    model_args: RecipeModelConfig,
    length: int,
    shared: SharedModel | None,
) -> TrainingSetup:
    recipe = settings.recipe
    keeps_reference = recipe.has_reference_model and not recipe_value(settings, "precompute_ref_log_probs")
    return TrainingSetup(
        method=settings.method,
        precision=settings.precision.name,
        optimizer=str(getattr(recipe_value(settings, "optim"), "value", recipe_value(settings, "optim"))),
        checkpointing=str(settings.checkpointing),
        long_rows=settings.checkpointing.in_tiles,
        fused=settings.fused,
        attention=_counted_as(attention),
        loss=_loss_of(settings),
        micro_batch_size=int(recipe_value(settings, "per_device_train_batch_size")) * recipe.rows_per_example,
        sequence_length=length,
        packing=bool(recipe_value(settings, "packing")),
        reference_model=keeps_reference and not settings.trains_adapters,
        reference_pass="within" if keeps_reference else "none",
        kl_rows=recipe.estimates_kl and recipe_value(settings, "loss_type") == "kto",
        accumulation=int(recipe_value(settings, "gradient_accumulation_steps")),
        sync_each_batch=bool(recipe_value(settings, "sync_each_batch")),
        reduce_dtype=settings.scale.reduce_dtype,
        lora=_lora_of(settings),
        double_quantisation=bool(model_args.use_bnb_nested_quant),
        compile=bool(recipe_value(settings, "torch_compile")),
        expandable_segments=extends_segments(),
        parallel=parallel_of(launch.parallel, launch.world_size, launch.local_world_size, shared),
    )


def _of_rewards(settings: Resolved, setup: TrainingSetup, card_bytes: float) -> TrainingSetup:
    """`setup` with the answers that the recipe generates, to prompts of `PROMPT_TOKENS` until the data are known.

    Raises:
        ConfigError: for ways to generate or score them that the planner does not model.
    """
    if not settings.recipe.generates:
        return setup
    for name, what in _UNPLANNED_REWARDS.items():
        if recipe_value(settings, name):
            raise ConfigError(f"{what} not planned.", place=f"--{name}", fix="use --plan off.")
    turns = recipe_value(settings, "steps_per_generation")
    if (together := recipe_value(settings, "generation_batch_size")) is not None:
        rows = int(together) // setup.parallel.num_gpus
    else:
        rows = setup.micro_batch_size * int(turns or setup.accumulation)
    written = GenerationSetup(max(1, rows), PROMPT_TOKENS, setup.sequence_length)
    reference = reference_of_rewards(float(recipe_value(settings, "beta") or 0.0))
    return replace(
        setup,
        sequence_length=written.total_length,
        generation=written,
        vllm=_vllm_of(settings, card_bytes),
        reference_model=reference["reference_model"] and not settings.trains_adapters,
        reference_pass=reference["reference_pass"],
    )


def _vllm_of(settings: Resolved, card_bytes: float) -> VllmSetup | None:
    if not recipe_value(settings, "use_vllm"):
        return None
    if recipe_value(settings, "vllm_mode") == "server":
        return VllmSetup()
    return VllmSetup(
        float(recipe_value(settings, "vllm_gpu_memory_utilization")) * card_bytes,
        sleeps=bool(recipe_value(settings, "vllm_enable_sleep_mode")),
        tensor_parallel=int(recipe_value(settings, "vllm_tensor_parallel_size")),
    )


def parallel_of(
    strategy: LaunchStrategy, world_size: int, gpus_per_node: int, shared: SharedModel | None = None
) -> ParallelSetup:
    """A launch file's strategy in the planner's terms, or the way a recipe's ranks share the model beside it.

    Raises:
        ConfigError: for a strategy that is not modelled.
    """
    from accel_scale.launching.strategy import is_true

    if not strategy.kind.is_planned:
        raise ConfigError(f"memory under {strategy.label} is not modelled.", place="launch file")
    if shared is not None and not shared.layout.is_plain:
        return _shared(strategy, shared, gpus_per_node)
    keeps_weights = strategy.fsdp.get("fsdp_sharding_strategy") == "SHARD_GRAD_OP"
    return ParallelSetup(
        strategy=strategy.name,
        num_gpus=world_size,
        gpus_per_node=gpus_per_node,
        num_replicas=strategy.num_replicas,
        reshard_after_forward=not keeps_weights and is_true(strategy.fsdp.get("fsdp_reshard_after_forward", True)),
        offload_optimizer=strategy.offload_optimizer,
        offload_params=strategy.offload_params,
        tensor_parallel=strategy.tensor_parallel_size,
        sequence_parallel=strategy.context_parallel_size,
        in_engine=strategy.context_parallel_size > 1,
        zero=zero_buffers(strategy.deepspeed.get("zero_optimization") or {}),
    )


def _shared(strategy: LaunchStrategy, shared: SharedModel, gpus_per_node: int) -> ParallelSetup:
    """As in `accel_scale.parallel.data_parallel`: one shard is a replica, not FSDP2; one gradient rank is not DDP."""
    from accel_scale.launching.strategy import is_true

    layout = shared.layout
    name = "fsdp2" if layout.shards_weights else "ddp" if layout.gradient_ranks > 1 else "single"
    return ParallelSetup(
        strategy=name,
        num_gpus=layout.world_size,
        gpus_per_node=gpus_per_node,
        num_replicas=layout.dp_replicate if layout.shards_weights else 1,
        reshard_after_forward=is_true(strategy.fsdp.get("fsdp_reshard_after_forward", True)),
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        sequence_parallel=layout.sp,
        pipeline_schedule=shared.schedule,
        stages_per_rank=shared.stages_per_rank if layout.pp > 1 else 1,
    )


def recipe_value(settings: Resolved, name: str) -> Any:
    """The value of a flag of the recipe's training configuration, else its default; None if there is no such flag."""
    from accel_scale.settings import trl_config

    config_class = getattr(trl_config, settings.recipe.config_class)
    default = next((f.default for f in fields(config_class) if f.name == name), None)
    return settings.values.get(name, default)


def _counted_as(attention: str) -> str:
    """The planner's name: packed SDPA counts as SDPA, a flash kernel from the hub as FlashAttention."""
    if attention == PACKED_ATTENTION:
        return "sdpa"
    return "flash_attention_2" if "/" in attention and "flash" in attention else attention


def _loss_of(settings: Resolved) -> str:
    if settings.recipe.loss != "chunked":
        return settings.recipe.loss
    return "chunked" if flag_of_whole_logits(settings.values) is None else "full"


def _lora_of(settings: Resolved) -> LoraSetup:
    from accel_scale.settings.trl_config import RecipeModelConfig

    model_args = settings.build(RecipeModelConfig)
    targets = model_args.lora_target_modules or ["all-linear"]
    names = [targets] if isinstance(targets, str) else list(targets)
    if model_args.lora_target_parameters or not all(n == "all-linear" or n.isidentifier() for n in names):
        raise ConfigError("adapters that a pattern chooses are not modelled.", place="--lora_target_modules")
    saved = (*(model_args.lora_modules_to_save or ()), *(("score",) if settings.recipe.rewards else ()))
    dropout = 0.0 if recipe_value(settings, "disable_dropout") else float(model_args.lora_dropout)
    return LoraSetup(model_args.lora_r, tuple(names), bool(model_args.use_dora), saved, dropout)
