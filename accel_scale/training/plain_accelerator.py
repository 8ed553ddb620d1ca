"""An `Accelerator` for a plain loop that knows its batch sizes before it has a data loader."""

from __future__ import annotations

import warnings
from typing import Any

from accel_scale.errors import ConfigError


def plain_accelerator(
    *,
    mixed_precision: str,
    micro_batch_size: int,
    accumulation: int,
    max_grad_norm: float,
    output_dir: str,
    report_to: list[str],
    compile_layers: bool = False,
) -> Any:
    """Accelerate for this launch. DeepSpeed is told the micro-batch, accumulation and clipping that the loop uses.

    Args:
        mixed_precision: ``no``, ``fp16`` or ``bf16``.
        micro_batch_size: Rows per rank and forward pass.
        accumulation: Micro-batches per optimizer step.
        max_grad_norm: Gradients are clipped to it.
        output_dir: Where trackers that write files do so.
        report_to: Names of trackers.
        compile_layers: Compile each of the model's layers when it is prepared.

    Raises:
        ConfigError: for a tracker that is not installed, or a DeepSpeed file that contradicts the flags.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, TorchDynamoPlugin

    from accel_scale.training.precision import enable_fp16_on_cpu

    dynamo = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if compile_layers else None
    accumulating = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False)
    # Said below, as an error.
    warnings.filterwarnings("ignore", message=".*no supported trackers are currently installed.*")
    try:
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            gradient_accumulation_plugin=accumulating,
            dynamo_plugin=dynamo,
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
    if accelerator.device.type == "cpu":
        # Gradients and optimizer states of rare tokens are full of denormal numbers, which slow a CPU down.
        torch.set_flush_denormal(True)
    enable_fp16_on_cpu(accelerator)
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
