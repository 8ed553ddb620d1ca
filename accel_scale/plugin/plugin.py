"""`ScalePlugin`: the recipes' features in your own training loop or trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from accel_scale.plugin.settings import ScaleSettings

if TYPE_CHECKING:
    from typing import TypeVar, TypeVarTuple

    from accelerate import Accelerator

    from accel_scale.plugin.scaled_accelerator import ScaledAccelerator

    T = TypeVar("T")
    Parts = TypeVarTuple("Parts")


@dataclass
class ScalePlugin(ScaleSettings):
    """Settings for an `Accelerator` loop or a trainer; a field that is None leaves the script's setting unchanged.

    Every field but `adapter` falls back to an environment variable, e.g. ``ACCEL_SCALE_PRECISION=bf16``. Create the
    plugin before the first `Accelerator` or `TrainingArguments`: a distributed launch without an accelerator is then
    rehearsed on CPU processes instead of falling apart into independent runs.

    Args:
        precision: ``fp32``, ``fp16``, ``bf16``, ``bf16_true`` or ``fp8``; must agree with the launch.
        checkpointing_policy: ``none``, ``full``, ``every_2`` …, ``selective``, ``attention``, ``mlp``, ``segments``,
            ``segments_2`` … or ``offload``.
        attention: ``eager``, ``sdpa``, ``flash_attention_2``, ``flash_attention_3`` or ``flex_attention``.
        adapter: A PEFT configuration; the script's model becomes its frozen base. In a plain loop it needs
            `optimizer`, because the script's own holds the base's weights.
        optimizer: A name of ``--optim``, e.g. ``adamw_torch_8bit``: replaces the script's; keeps its parameter groups.
        optim_args: Same as ``--optim_args``: ``key=value,key=value``.
        learning_rate: Peak learning rate; None keeps the script's.
        weight_decay: Weight decay of the groups that already decay; None keeps the script's.
        lr_schedule: A name of ``--lr_scheduler_type``, or ``wsd``: replaces the script's.
        num_training_steps: Length of the schedule in optimizer steps; a trainer knows it already.
        warmup_ratio, min_lr_ratio, decay_ratio, decay_shape: Same as the recipes' flags.
        scale_lr_from_batch_size: ``linear`` or ``sqrt``: scales from `lr_base_batch_size` to the global batch.
        global_batch_size: Sequences per optimizer step over all ranks; accumulation is derived from it.
        micro_batch_size: Sequences per rank and step; None uses the data loader's batch size.
        device_memory: Cap on the CUDA allocator, e.g. ``24GiB``.
        fp8_emulate: Emulate fp8 products on hardware without them.
        sync_batch_norm: Compute BatchNorm's statistics over all ranks (torch's `SyncBatchNorm`, on GPUs).
        verify_first_checkpoint: Read a trainer's first checkpoint back and compare it with the weights in memory.
        guard: ``skip``, ``lower_lr`` or ``stop``: how a trainer handles steps whose loss or gradient norm is not
            finite or spikes. In a plain loop use `GuardedStep`.
        guard_threshold, guard_max_skips: Same as the recipes' flags.

    Raises:
        ConfigError: for a value that cannot be honoured, naming the field or the environment variable.
    """

    def accelerator(self, **kwargs: Any) -> ScaledAccelerator:
        """Create an `Accelerator` from `kwargs` and these settings. Its `prepare` prepares model, optimizer and
        schedule; its `save_state` writes atomically."""
        from accel_scale.plugin.scaled_accelerator import make_accelerator

        with self.in_words_of_fields():
            return make_accelerator(self, kwargs)

    @overload
    def prepare(self, accelerator: Accelerator, part: T, /, **kwargs: object) -> T: ...

    @overload
    def prepare(self, accelerator: Accelerator, /, *parts: *Parts, **kwargs: object) -> tuple[*Parts]: ...

    def prepare(self, accelerator: Accelerator, /, *parts: object, **kwargs: object) -> Any:  # type: ignore[misc]
        """Same as ``accelerator.prepare(*parts)``, after applying the settings to each part."""
        from accel_scale.plugin.scaled_accelerator import prepare

        with self.in_words_of_fields():
            return prepare(self, accelerator, parts, kwargs)

    def trainer(self, trainer_class: type[T]) -> type[T]:
        """Return `trainer_class`, from HF or TRL, with these settings: ``plugin.trainer(SFTTrainer)(model=…)``."""
        from accel_scale.plugin.trainer_mixin import scaled_trainer_class

        return scaled_trainer_class(trainer_class, self)
