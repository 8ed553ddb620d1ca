"""An `Accelerator` for a plain loop that knows its batch sizes before there is a data loader."""

from __future__ import annotations

import os
import warnings
from typing import Any

from accel_scale.errors import ConfigError


def plain_accelerator(
    *,
    mixed_precision: str,
    micro_batch_size: int,
    accumulation: int,
    sync_each_batch: bool,
    max_grad_norm: float,
    output_dir: str,
    report_to: list[str],
    compile_layers: bool = False,
    ddp: Any = None,
    ranks_share_model: bool = False,
    collective_timeout: str | None = None,
    program: str = "pretrain.py",
) -> Any:
    """Accelerate for this launch. DeepSpeed is told the micro-batch, accumulation and clipping that the loop uses.

    Args:
        mixed_precision: ``no``, ``fp16`` or ``bf16``.
        micro_batch_size: Rows per rank and forward pass.
        accumulation: Micro-batches per optimizer step.
        sync_each_batch: Reduce the gradients of every micro-batch, not of a step's last alone.
        max_grad_norm: Gradients are clipped to it.
        output_dir: Where trackers that write files do so.
        report_to: Names of trackers.
        compile_layers: Compile each of the model's layers when it is prepared.
        ddp: Arguments with ``ddp_comm_hook`` and the like, see `DdpSettings`; None: DDP as it is.
        ranks_share_model: `parallelize` will shard the model, and the launch file's FSDP must leave it alone.
        collective_timeout: How long ranks wait for one another, e.g. ``10m``.
        program: Begins the line that says which rank was missing.

    Raises:
        ConfigError: for a tracker that is not installed, or a DeepSpeed file that contradicts the flags.
    """
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, TorchDynamoPlugin

    from accel_scale.modeling.precision import enable_fp16_on_cpu
    from accel_scale.training.ddp.hooks import DdpSettings, use_ddp_settings
    from accel_scale.training.resilience.collective_timeout import backend_timeout, watch_accelerator

    if ranks_share_model:
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
            os.environ[name] = "false"
    dynamo = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if compile_layers else None
    accumulating = GradientAccumulationPlugin(
        num_steps=accumulation, sync_with_dataloader=False, sync_each_batch=sync_each_batch
    )
    handler = InitProcessGroupKwargs(timeout=backend_timeout(collective_timeout))
    # Said below, as an error.
    warnings.filterwarnings("ignore", message=".*no supported trackers are currently installed.*")
    try:
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            gradient_accumulation_plugin=accumulating,
            dynamo_plugin=dynamo,
            kwargs_handlers=[handler],
            log_with=report_to or None,
            project_dir=output_dir,
        )
    except ValueError as error:
        raise ConfigError(
            str(error).strip().splitlines()[0], place="--report_to", fix="pip install 'accel-scale[tracking]'."
        ) from None
    missing = set(report_to) - {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    if missing:
        raise ConfigError(
            f"{', '.join(sorted(missing))} is not installed or no tracker.",
            place="--report_to",
            fix="pip install 'accel-scale[tracking]', or remove it.",
        )
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        _tell_deepspeed(plugin.deepspeed_config, micro_batch_size, accumulation, max_grad_norm)
    enable_fp16_on_cpu(accelerator)
    use_ddp_settings(accelerator, DdpSettings.of(ddp))
    watch_accelerator(accelerator, collective_timeout, program)
    return accelerator


def _tell_deepspeed(config: dict[str, Any], micro_batch_size: int, accumulation: int, max_grad_norm: float) -> None:
    wanted = {
        "train_micro_batch_size_per_gpu": (micro_batch_size, "--per_device_train_batch_size"),
        "gradient_accumulation_steps": (accumulation, "--global_batch_size"),
        "gradient_clipping": (max_grad_norm, "--max_grad_norm"),
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
