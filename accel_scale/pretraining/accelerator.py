"""An `Accelerator` for a plain loop that knows its batch sizes before it has a data loader."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.secrets import without_secrets

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accel_scale.flags.pretraining import PretrainArguments
    from accel_scale.settings.resolved import Resolved

_PLAIN = (int, float, str, bool)  # types that trackers accept as settings


def plain_accelerator(
    args: PretrainArguments,
    settings: Resolved,
    *,
    compile_layers: bool = False,
    ranks_share_model: bool = False,
    program: str = "pretrain.py",
) -> Accelerator:
    """Create the launch's `Accelerator`; DeepSpeed gets the micro-batch, accumulation and clipping of the loop.

    Args:
        args: Length of the run, training settings, DDP's communication, and the trackers.
        settings: Supplies precision and accumulation.
        compile_layers: Compile each of the model's layers when the model is prepared.
        ranks_share_model: `parallelize` will shard the model, so the launch file's FSDP must not.
        program: Start of the line that names a missing rank.

    Raises:
        ConfigError: if a DeepSpeed file contradicts the flags.
    """
    from accelerate import Accelerator
    from accelerate.utils import (
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )

    from accel_scale.flags.trackers import chosen_trackers
    from accel_scale.launching.cpu_process import use_onednn_in_fp32
    from accel_scale.modeling.precision import enable_fp16_on_cpu
    from accel_scale.starting.sparing_imports import unwrap_without_deepspeed
    from accel_scale.training.ddp.gradient_numbers import use_gradient_numbers
    from accel_scale.training.ddp.hooks import DdpSettings, use_ddp_settings
    from accel_scale.training.resilience.collective_timeout import backend_timeout, watch_accelerator

    unwrap_without_deepspeed()
    if ranks_share_model:
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
            os.environ[name] = "false"
    dynamo = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if compile_layers else None
    accumulating = GradientAccumulationPlugin(
        num_steps=settings.accumulation, sync_with_dataloader=False, sync_each_batch=args.sync_each_batch
    )
    handler = InitProcessGroupKwargs(timeout=backend_timeout(args.collective_timeout))
    # Functions with constant results, in layers that are compiled.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    accelerator = Accelerator(
        mixed_precision=settings.precision.mixed_precision,
        gradient_accumulation_plugin=accumulating,
        dynamo_plugin=dynamo,
        kwargs_handlers=[handler],
        log_with=chosen_trackers(args.report_to, in_trainer=False) or None,
        project_config=ProjectConfiguration(args.output_dir, logging_dir=str(Path(args.output_dir) / "runs")),
    )
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        _tell_deepspeed(plugin.deepspeed_config, args, settings.accumulation)
    enable_fp16_on_cpu(accelerator)
    if accelerator.device.type == "cpu":
        use_onednn_in_fp32()  # rows of pretraining have one length
    use_gradient_numbers(accelerator, args)
    use_ddp_settings(accelerator, DdpSettings.of(args))
    watch_accelerator(accelerator, args.collective_timeout, program)
    return accelerator


def start_trackers(accelerator: Accelerator, args: PretrainArguments, values: Mapping[str, object]) -> None:
    """Start the trackers of ``--report_to`` with the run's settings; does nothing without trackers.

    Args:
        values: Flag → value; credentials are left out.
    """
    kept = {name: value for name, value in without_secrets(dict(values)).items() if isinstance(value, _PLAIN)}
    named = {"wandb": {"name": args.run_name}, "mlflow": {"run_name": args.run_name}}
    named["trackio"] = {"name": args.run_name, "resume": "allow"}
    accelerator.init_trackers(args.project, config=kept, init_kwargs=named)


def _tell_deepspeed(config: dict[str, Any], args: PretrainArguments, accumulation: int) -> None:
    wanted = {
        "train_micro_batch_size_per_gpu": (args.per_device_train_batch_size, "--per_device_train_batch_size"),
        "gradient_accumulation_steps": (accumulation, "--global_batch_size"),
        "gradient_clipping": (args.max_grad_norm, "--max_grad_norm"),
    }
    for key, (value, flag) in wanted.items():
        given = config.get(key, "auto")
        if given not in ("auto", value):
            raise ConfigError(
                f"{key} is {given} in the launch file's DeepSpeed configuration, and {flag} says {value}.",
                place=flag,
                fix=f"write {key}: auto there.",
            )
        config[key] = value
    config["train_batch_size"] = "auto"
