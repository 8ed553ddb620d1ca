"""Model parallelism in the pretraining recipe: checks, splitting and saving the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.flags.parallel import ParallelArguments
from accel_scale.parallel.layout import ParallelLayout
from accel_scale.parallel.model_parallel import ModelParallel, parallelize
from accel_scale.settings.planned_setup import SharedModel
from accel_scale.starting.layout import stages_per_rank

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.parallel.pipelines.pipeline import PipelineSettings
    from accel_scale.settings.resolved import Resolved
    from accel_scale.training.saving.verification import VerifyResult


def check_layout(
    layout: ParallelLayout,
    settings: Resolved,
    parallel_args: ParallelArguments,
    model_config: PreTrainedConfig,
    attention: str,
) -> None:
    """Refuse what this model or these flags do not support in the run's layout, before anything is loaded.

    Raises:
        ConfigError: for the first contradiction.
    """
    if layout.is_plain:
        return
    values, sources = settings.values, settings.sources

    def refuse(flag: str, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"{problem} under {layout.label}.", place=sources.get(flag, f"--{flag}"), fix=fix)

    if values.get("torch_compile"):
        raise refuse("torch_compile", "layers are not compiled", "remove it.")
    if settings.precision.fp8:
        raise refuse("precision", "fp8 is not available", "use bf16.")
    if settings.precision.name == "fp16":
        raise refuse("precision", "fp16's loss scale is not agreed upon", "use bf16.")
    wants_sample = values.get("sample_tokens") and sources.get("sample_tokens", "default") != "default"
    if wants_sample and not layout.can_generate:
        raise refuse("sample_tokens", "no text is generated while training", "generate from the saved model.")
    splits_backward = layout.pp > 1 and pipeline_settings(parallel_args).splits_backward
    if settings.checkpointing.in_tiles and (layout.tp > 1 or splits_backward):
        why = "layers are not computed in tiles with --pp_schedule zero_bubble or"
        raise refuse("long_rows", f"{why} tensor parallelism", "leave it out, or share rows with --sp_size.")
    if layout.tp > 1:
        from accel_scale.parallel.tensor import check_tensor_parallel

        check_tensor_parallel(model_config, layout.tp, method=settings.method)
    if layout.sp > 1:
        from accel_scale.parallel.sequence import check_sequence_parallel

        check_sequence_parallel(model_config, layout.sp, values["max_length"], attention, tp_size=layout.tp)
    if layout.pp > 1:
        from accel_scale.parallel.pipelines.pipeline import check_pipeline

        if settings.method == "lora":
            raise refuse("method", "adapters are not split into stages", "train them without a pipeline.")
        check_pipeline(
            model_config,
            pipeline_settings(parallel_args),
            layout.pp,
            settings.accumulation,
            checkpointing=str(settings.checkpointing),
        )


def pipeline_settings(parallel_args: ParallelArguments) -> PipelineSettings:
    """Convert the pipeline flags into `PipelineSettings`."""
    from accel_scale.parallel.pipelines.pipeline import PipelineSettings

    return PipelineSettings(parallel_args.pp_schedule or "1f1b", stages_per_rank(parallel_args))


def planned_sharing(layout: ParallelLayout, parallel_args: ParallelArguments) -> SharedModel:
    """How ranks share the model, in the form that the planner uses."""
    pipeline = pipeline_settings(parallel_args)
    return SharedModel(layout, pipeline.schedule, pipeline.stages_per_rank)


def share_model(
    accelerator: Accelerator,
    model: nn.Module,
    layout: ParallelLayout,
    settings: Resolved,
    parallel_args: ParallelArguments,
    launch: LaunchEnvironment,
) -> ModelParallel | None:
    """Split the model according to the run's layout; None if ranks do not share it."""
    from accel_scale.launching.strategy import is_true

    if layout.is_plain:
        return None
    precision = settings.precision
    mixed = precision.compute_dtype if precision.compute_dtype != precision.model_dtype else None
    return parallelize(
        accelerator,
        model,
        layout,
        reshard_after_forward=is_true(launch.parallel.fsdp.get("fsdp_reshard_after_forward", True)),
        compute_dtype=mixed,
        pipeline=pipeline_settings(parallel_args) if layout.pp > 1 else None,
        num_micro_batches=settings.accumulation,
        row_length=settings.values["max_length"],
    )


def prepare_all(
    accelerator: Accelerator,
    model: nn.Module,
    parallel: ModelParallel | None,
    optimizer: Optimizer,
    schedule: LRScheduler,
) -> tuple[nn.Module, AcceleratedOptimizer, AcceleratedScheduler]:
    """Prepare model, optimizer and schedule. Accelerate wraps a model unless ranks share it; then it is ready."""
    if parallel is None:
        wrapped, stepped, scheduled = accelerator.prepare(model, optimizer, schedule)
        return wrapped, stepped, scheduled
    import torch

    stepped, scheduled = accelerator.prepare(optimizer, schedule)
    return parallel.parts[0] if parallel.pipeline is None else torch.nn.ModuleList(parallel.parts), stepped, scheduled


def save_model_of(
    accelerator: Accelerator,
    model: nn.Module,
    parallel: ModelParallel | None,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str,
    *,
    method: str,
) -> VerifyResult | None:
    """Write the final folder, which plain `from_pretrained` loads, and read it back once; see `save_final`."""
    from accel_scale.training.saving.final_model import save_final

    if parallel is not None and method == "full":
        from accel_scale.training.saving.final_shared import save_final_shared

        return save_final_shared(parallel, tokenizer, output_dir)
    return save_final((accelerator, model, tokenizer), output_dir)
