"""accel-scale: plan, rehearse, run and trust language model training on Hugging Face Accelerate.

Public names are listed in `_EXPORTS` and imported on first use, so `import accel_scale` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    "ConfigError": "accel_scale.errors",
    "ScalePlugin": "accel_scale.plugin",
    "ensure_chat_template": "accel_scale.data.chat",
    "ensure_stop_token": "accel_scale.data.chat",
    "LengthDistribution": "accel_scale.data.lengths",
    "length_distribution": "accel_scale.data.lengths",
    "loader_settings": "accel_scale.data.loaders",
    "LoadedData": "accel_scale.data.loading",
    "load_training_data": "accel_scale.data.loading",
    "Finding": "accel_scale.launching.checks",
    "check_run": "accel_scale.launching.checks",
    "refuse_errors": "accel_scale.launching.checks",
    "LaunchEnvironment": "accel_scale.launching.environment",
    "current_launch": "accel_scale.launching.environment",
    "LaunchFile": "accel_scale.launching.launch_file",
    "read_launch_file": "accel_scale.launching.launch_file",
    "Machine": "accel_scale.launching.machine",
    "detect_machine": "accel_scale.launching.machine",
    "enable_rehearsal_if_needed": "accel_scale.launching.rehearsal",
    "RunSettings": "accel_scale.launching.run_settings",
    "shrink_config": "accel_scale.launching.shrink",
    "lora_config": "accel_scale.training.adapters",
    "quantization_config": "accel_scale.training.adapters",
    "prepare_quantized_base": "accel_scale.training.adapters",
    "resolve_attention": "accel_scale.training.attention",
    "derive_accumulation": "accel_scale.training.batch",
    "CheckpointingPolicy": "accel_scale.training.checkpointing",
    "apply_checkpointing": "accel_scale.training.checkpointing",
    "CheckpointManager": "accel_scale.training.checkpoints",
    "cap_device_memory": "accel_scale.training.device",
    "ExactMatch": "accel_scale.training.exact_match",
    "exact_match": "accel_scale.training.exact_match",
    "FastLossMixin": "accel_scale.training.fast_loss",
    "Guard": "accel_scale.training.guard",
    "GuardSettings": "accel_scale.training.guard_settings",
    "GuardedStep": "accel_scale.training.guarded_step",
    "GuardMixin": "accel_scale.training.guard_mixin",
    "chunked_cross_entropy": "accel_scale.training.loss",
    "OPTIMIZER_NAMES": "accel_scale.training.optimizers",
    "create_optimizer": "accel_scale.training.optimizers",
    "Precision": "accel_scale.training.precision",
    "resolve_precision": "accel_scale.training.precision",
    "AtomicSavingMixin": "accel_scale.training.saving",
    "save_atomically": "accel_scale.training.saving",
    "save_final": "accel_scale.training.saving",
    "SequenceParallelMixin": "accel_scale.training.sequence_mixin",
    "create_schedule": "accel_scale.training.schedules",
    "scaled_learning_rate": "accel_scale.training.schedules",
    "verify_checkpoint": "accel_scale.training.verification",
    "merge_adapter": "accel_scale.training.merge",
    "MergeResult": "accel_scale.training.merge",
    "ScaleTrainerMixin": "accel_scale.training.callbacks",
    "latest_complete_checkpoint": "accel_scale.training.saving",
    "CheckpointMismatch": "accel_scale.training.saving",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
