"""An `Accelerator` for a plain loop that knows its batch sizes before there is a data loader."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accel_scale.flags.pretraining import PretrainArguments
    from accel_scale.settings.resolved import Resolved


def plain_accelerator(
    args: PretrainArguments,
    settings: Resolved,
    *,
    compile_layers: bool = False,
    ranks_share_model: bool = False,
    program: str = "pretrain.py",
) -> Accelerator:
    """Accelerate for this launch. DeepSpeed is told the micro-batch, accumulation and clipping that the loop uses.

    Args:
        args: How long and how to train, what DDP sends, and the trackers.
        settings: Precision and accumulation are read.
        compile_layers: Compile each of the model's layers when it is prepared.
        ranks_share_model: `parallelize` will shard the model, and the launch file's FSDP must leave it alone.
        program: Begins the line that says which rank was missing.

    Raises:
        ConfigError: for a tracker that is not installed, or a DeepSpeed file that contradicts the flags.
    """
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, LoggerType, TorchDynamoPlugin

    from accel_scale.launching.cpu_process import use_onednn_in_fp32
    from accel_scale.modeling.precision import enable_fp16_on_cpu
    from accel_scale.training.ddp.gradient_numbers import use_gradient_numbers
    from accel_scale.training.ddp.hooks import DdpSettings, use_ddp_settings
    from accel_scale.training.resilience.collective_timeout import backend_timeout, watch_accelerator

    if ranks_share_model:
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
            os.environ[name] = "false"
    dynamo = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if compile_layers else None
    accumulating = GradientAccumulationPlugin(
        num_steps=settings.accumulation, sync_with_dataloader=False, sync_each_batch=args.sync_each_batch
    )
    handler = InitProcessGroupKwargs(timeout=backend_timeout(args.collective_timeout))
    # Functions that say the same whenever they are called, in layers that are compiled.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    # Said below, as an error.
    warnings.filterwarnings("ignore", message=".*no supported trackers are currently installed.*")
    if unknown := sorted(set(args.report_to) - set(LoggerType.list())):
        raise ConfigError(
            f"{', '.join(unknown)} is no tracker that Accelerate knows.",
            place="--report_to",
            fix=f"choose from {', '.join(LoggerType.list())}.",
        )
    accelerator = Accelerator(
        mixed_precision=settings.precision.mixed_precision,
        gradient_accumulation_plugin=accumulating,
        dynamo_plugin=dynamo,
        kwargs_handlers=[handler],
        log_with=args.report_to or None,
        project_dir=args.output_dir,
    )
    installed = {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    if missing := set(args.report_to) - {"all"} - installed:
        raise ConfigError(
            f"{', '.join(sorted(missing))} is not installed.",
            place="--report_to",
            fix="pip install 'accel-scale[tracking]', or remove it.",
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
