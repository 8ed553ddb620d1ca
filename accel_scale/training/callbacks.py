"""accel-scale's settings inside HF `Trainer` and every TRL trainer: a mixin that applies a `ScalePlugin`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.launching.begin import begin_process
from accel_scale.secrets import move_token_to_environment
from accel_scale.training.guard_mixin import GuardMixin
from accel_scale.training.learning import LearningMixin, refuse_unlabelled
from accel_scale.training.output_mixin import OutputFolderMixin
from accel_scale.training.preparing import prepare_model, strategy_of
from accel_scale.training.recovery_mixin import MemoryRecoveryMixin
from accel_scale.training.saving import AtomicSavingMixin

if TYPE_CHECKING:
    from accel_scale.plugin import ScalePlugin


class ScaleTrainerMixin(LearningMixin, GuardMixin, MemoryRecoveryMixin, OutputFolderMixin, AtomicSavingMixin):
    """Put before a trainer class: the plugin's settings, its guard, recovery when memory runs out, atomic saving, and
    the first checkpoint read back.

        class ScaledSFTTrainer(ScaleTrainerMixin, SFTTrainer):
            scale = ScalePlugin(optimizer="adamw_torch_8bit", lr_schedule="wsd")

    What the plugin leaves open stays with the trainer's own arguments. `ScalePlugin.trainer` makes such a class.
    """

    scale: ScalePlugin
    flag = "{}"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        begin_process()
        signature = inspect.signature(super().__init__)
        bound = signature.bind_partial(*args, **kwargs)
        training_args = bound.arguments.get("args")
        if training_args is None:
            raise ConfigError(
                "the trainer was made without `args`.", place="ScalePlugin.trainer", fix="pass TrainingArguments."
            )
        self._adapt_arguments(training_args)
        super().__init__(*args, **kwargs)
        for what, rows in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            refuse_unlabelled(rows, what=what, max_length=getattr(self.args, "max_length", None), flag=self.flag)
        self.verify_first_checkpoint = bool(self.scale.verify_first_checkpoint)
        self.guard_settings = self.scale.guard_settings()
        self.model = prepare_model(
            self.model,
            strategy=strategy_of(self.accelerator),
            device_type=self.accelerator.device.type,
            precision=self._precision,
            policy=self.scale.policy,
            attention=self.scale.attention,
            adapter=self.scale.adapter,
        )
        if self.scale.adapter is not None or self.model_wrapped is None:
            self.model_wrapped = self.model

    def _adapt_arguments(self, training_args: Any) -> None:
        """What must be known before the trainer makes its `Accelerator`."""
        scale = self.scale
        move_token_to_environment(training_args)
        scale.check_rehearsal(training_args.world_size)
        if training_args.save_strategy != "no":
            scale.check_checkpoints()
        device_type = training_args.device.type
        self._precision = scale.resolve_precision(device_type, trains_adapters=scale.adapter is not None)
        if self._precision is None and training_args.deepspeed_plugin is not None:
            # Without the plugin's word the launch's holds, as transformers has it under every other strategy.
            for name in ("bf16", "fp16"):
                setattr(training_args, name, training_args.mixed_precision == name)
        if self._precision is not None:
            training_args.mixed_precision = self._precision.mixed_precision
            for flag, value in self._precision.trainer_flags.items():
                setattr(training_args, flag, value)
            if training_args.deepspeed_plugin is not None:
                training_args.deepspeed_plugin.set_mixed_precision(self._precision.mixed_precision)
        if scale.policy is not None:  # ours, applied once, in place of the trainer's
            training_args.activation_checkpointing = False
        if scale.micro_batch_size is not None:
            training_args.per_device_train_batch_size = scale.micro_batch_size
        accumulation = scale.accumulation(training_args.per_device_train_batch_size, training_args.world_size)
        if accumulation is not None:
            training_args.gradient_accumulation_steps = accumulation
        scale.cap_memory(device_type, training_args.device.index or 0)
        if scale.weight_decay is not None:
            training_args.weight_decay = scale.weight_decay
        training_args.learning_rate = scale.scaled_learning_rate(
            training_args.learning_rate,
            training_args.per_device_train_batch_size
            * training_args.gradient_accumulation_steps
            * training_args.world_size,
        )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The plugin's optimizer over the trainer's own parameter groups."""
        if self.scale.optimizer is not None and self.optimizer is None:
            from accel_scale.training.optimizers import optimizer_cls_and_kwargs

            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(
                self.scale.optimizer,
                self.args,
                optim_args=self.scale.optim_args or {},
                model=self.model,
                device_type=self.accelerator.device.type,
                strategy=strategy_of(self.accelerator),
                offload_optimizer=self.scale.launch.parallel.offload_optimizer != "none",
            )
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The plugin's schedule over the steps that will really be taken."""
        if self.scale.lr_schedule is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        schedule: Any = self.scale.schedule(optimizer or self.optimizer, num_training_steps)
        self.lr_scheduler, self._created_lr_scheduler = schedule, True
        return schedule


def scaled_trainer_class(trainer_class: type, scale: ScalePlugin) -> type:
    """`trainer_class` with `scale` applied: another class of the same name, for any HF or TRL trainer."""
    return type(trainer_class.__name__, (ScaleTrainerMixin, trainer_class), {"scale": scale})
