"""accel-scale: plan, rehearse, run and trust language model training on Hugging Face Accelerate.

Public names are the imports below. Type checkers read them; at run time each is imported on first use, so
`import accel_scale` costs milliseconds. docs/library.md says what each is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.version import __version__ as __version__

if TYPE_CHECKING:
    from accel_scale.data.chat import ensure_chat_template as ensure_chat_template
    from accel_scale.data.chat import ensure_stop_token as ensure_stop_token
    from accel_scale.data.lengths import length_distribution as length_distribution
    from accel_scale.ending.user_errors import CheckpointNotSaved as CheckpointNotSaved
    from accel_scale.errors import ConfigError as ConfigError
    from accel_scale.flags.guard_settings import GuardSettings as GuardSettings
    from accel_scale.launching.cpu_process import tune_cpu_process as tune_cpu_process
    from accel_scale.launching.memory_cap import cap_device_memory as cap_device_memory
    from accel_scale.launching.rehearsal import enable_rehearsal_if_needed as enable_rehearsal_if_needed
    from accel_scale.merging.adapter import merge_adapter as merge_adapter
    from accel_scale.modeling.activation_checkpointing import apply_checkpointing as apply_checkpointing
    from accel_scale.modeling.recomputing.policies import CheckpointingPolicy as CheckpointingPolicy
    from accel_scale.optimization.batch import derive_accumulation as derive_accumulation
    from accel_scale.optimization.fast_loss import FastLossMixin as FastLossMixin
    from accel_scale.optimization.loss import chunked_cross_entropy as chunked_cross_entropy
    from accel_scale.optimization.optimizers import create_optimizer as create_optimizer
    from accel_scale.optimization.schedules import create_schedule as create_schedule
    from accel_scale.planning.search.api import cheapest as cheapest
    from accel_scale.planning.search.api import inference_memory as inference_memory
    from accel_scale.planning.search.api import largest_batch as largest_batch
    from accel_scale.planning.search.api import longest_row as longest_row
    from accel_scale.planning.search.api import plan as plan
    from accel_scale.planning.search.api import predict_memory as predict_memory
    from accel_scale.planning.search.api import what_if as what_if
    from accel_scale.plugin.plugin import ScalePlugin as ScalePlugin
    from accel_scale.plugin.trainer_mixin import ScaleTrainerMixin as ScaleTrainerMixin
    from accel_scale.recipe_specs.spec import RecipeSpec as RecipeSpec
    from accel_scale.shrinking.shrink import shrink_config as shrink_config
    from accel_scale.trainers.guard_mixin import GuardMixin as GuardMixin
    from accel_scale.trainers.saving_mixin import AtomicSavingMixin as AtomicSavingMixin
    from accel_scale.trainers.sequence_mixin import SequenceParallelMixin as SequenceParallelMixin
    from accel_scale.training.checkpoints.folders import latest_complete_checkpoint as latest_complete_checkpoint
    from accel_scale.training.checkpoints.manager import CheckpointManager as CheckpointManager
    from accel_scale.training.checkpoints.staging import save_atomically as save_atomically
    from accel_scale.training.evaluation.exact_match import exact_match as exact_match
    from accel_scale.training.guard.guard import Guard as Guard
    from accel_scale.training.guard.guarded_step import GuardedStep as GuardedStep
    from accel_scale.training.resilience.memory_recovery import MemoryRecovery as MemoryRecovery
    from accel_scale.training.saving.final_model import save_final as save_final
    from accel_scale.training.saving.verification import CheckpointMismatch as CheckpointMismatch
    from accel_scale.training.saving.verification import verify_checkpoint as verify_checkpoint
else:
    import importlib
    import pkgutil
    import re

    _IMPORT = re.compile(r"^    from (accel_scale[\w.]*) import (\w+) as \2$", re.MULTILINE)
    _EXPORTS = {name: module for module, name in _IMPORT.findall(pkgutil.get_data(__name__, "__init__.py").decode())}

    __all__ = ["__version__", *_EXPORTS]

    def __getattr__(name):
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)
