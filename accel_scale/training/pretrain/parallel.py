"""Model parallelism in the pretraining recipe: what is refused, and how the model is split, saved and sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.parallel.model_parallel import ModelParallel, parallelize
from accel_scale.starting.layout import stages_per_rank


def check_layout(run: Any) -> None:
    """Refuse what this model, or these flags, cannot do in the run's layout; before anything is loaded.

    Raises:
        ConfigError: for the first contradiction.
    """
    layout, values, sources = run.layout, run.settings.values, run.settings.sources
    if layout.is_plain:
        return

    def refuse(flag: str, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"{problem} under {layout.label}.", place=sources.get(flag, f"--{flag}"), fix=fix)

    if values.get("torch_compile"):
        raise refuse("torch_compile", "layers are not compiled", "remove it.")
    if run.settings.precision.fp8:
        raise refuse("precision", "fp8 is not available", "use bf16.")
    if run.settings.precision.name == "fp16":
        raise refuse("precision", "fp16's loss scale is not agreed upon", "use bf16.")
    if (layout.pp > 1 or layout.sp > 1) and values.get("sample_tokens"):
        if sources.get("sample_tokens", "default") != "default":
            raise refuse("sample_tokens", "no text is generated while training", "generate from the saved model.")
        run.args.sample_tokens = 0
    method = run.settings.method
    if layout.tp > 1:
        from accel_scale.parallel.tensor import check_tensor_parallel

        check_tensor_parallel(run.model_config, layout.tp, method=method)
    if layout.sp > 1:
        from accel_scale.parallel.sequence import check_sequence_parallel

        check_sequence_parallel(
            run.model_config, layout.sp, run.data_args.max_length, run.attention, tp_size=layout.tp
        )
    if layout.pp > 1:
        from accel_scale.parallel.pipelines.pipeline import check_pipeline

        if method == "lora":
            raise refuse("method", "adapters are not split into stages", "train them without a pipeline.")
        check_pipeline(
            run.model_config,
            pipeline_settings(run),
            layout.pp,
            _micro_batches(run),
            checkpointing=str(run.settings.checkpointing),
        )


def pipeline_settings(run: Any) -> Any:
    """The flags of a pipeline as `PipelineSettings`."""
    from accel_scale.parallel.pipelines.pipeline import PipelineSettings

    return PipelineSettings(run.parallel_args.pp_schedule or "1f1b", stages_per_rank(run.parallel_args))


def _micro_batches(run: Any) -> int:
    return int(run.settings.values.get("gradient_accumulation_steps", 1))


def build_to_share(run: Any, build: Callable[[], Any]) -> Any:
    """What `build` makes; where ranks of a server share the model, it is made there once.

    Args:
        run: The recipe's.
        build: Makes the model of the run's configuration, with its weights.
    """
    if run.layout.is_plain or run.launch.local_world_size == 1:
        return build()
    from accel_scale.modeling.loading import skeleton_of
    from accel_scale.parallel.mapped_weights import build_once_per_server, fits_on_each

    def skeleton() -> Any:
        return skeleton_of(run.model_config, run.attention, trust_remote_code=run.model_args.trust_remote_code)

    num_params = skeleton().num_parameters()
    return build_once_per_server(
        build,
        skeleton,
        local_rank=run.launch.local_rank,
        num_bytes=4 * num_params,
        fits_on_each=fits_on_each(num_params, run.launch.local_world_size),
    )


def share_model(run: Any, model: Any) -> ModelParallel | None:
    """The model split as the run's layout says; None where ranks do not share it."""
    from accel_scale.launching.strategy import is_true

    if run.layout.is_plain:
        return None
    precision = run.settings.precision
    mixed = precision.compute_dtype if precision.compute_dtype != precision.model_dtype else None
    return parallelize(
        run.accelerator,
        model,
        run.layout,
        reshard_after_forward=is_true(run.launch.parallel.fsdp.get("fsdp_reshard_after_forward", True)),
        compute_dtype=mixed,
        pipeline=pipeline_settings(run) if run.layout.pp > 1 else None,
        num_micro_batches=_micro_batches(run),
        row_length=run.data_args.max_length,
    )


def prepare_all(run: Any, model: Any, optimizer: Any, schedule: Any) -> tuple[Any, Any, Any]:
    """What the loop trains with. Accelerate wraps a model that ranks do not share; one that they do is ready."""
    if run.parallel is None:
        return tuple(run.accelerator.prepare(model, optimizer, schedule))  # type: ignore[return-value]
    import torch

    optimizer, schedule = run.accelerator.prepare(optimizer, schedule)
    parts = run.parallel.parts
    return parts[0] if run.layout.pp == 1 else torch.nn.ModuleList(parts), optimizer, schedule


def run_pipeline(run: Any, step: Any, drawn: Any, num_tokens: Any) -> None:
    """Forward and backward passes of an optimizer step's micro-batches, in the order of the pipeline's schedule."""
    device = run.accelerator.device
    micro_batches = [
        run.parallel.local({name: t.to(device, non_blocking=True) for name, t in batch.items()})
        for batch in drawn.micro_batches
    ]
    losses = run.parallel.pipeline.forward_backward(micro_batches, num_tokens, step.loss_factor)
    step.record(losses, drawn.row_ids)


def save_model_of(run: Any) -> Any:
    """The final folder, which plain `from_pretrained` loads, read back once; see `save_final`."""
    from accel_scale.training.saving.final_model import save_final

    if run.parallel and run.settings.method == "full":
        from accel_scale.training.saving.final_shared import save_final_shared

        return save_final_shared(run.parallel, run.tokenizer, run.args.output_dir)
    return save_final((run.accelerator, run.model, run.tokenizer), run.args.output_dir)
