"""A mixin that applies a `ScalePlugin` to the HF `Trainer` and to every TRL trainer."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import Trainer

from accel_scale.data.worker_start import refuse_unpicklable
from accel_scale.errors import ConfigError
from accel_scale.modeling.precision import enable_fp16_on_cpu
from accel_scale.parallel.engine import strategy_of
from accel_scale.plugin.batch_norm import settle_batch_norm
from accel_scale.plugin.field_words import in_words_of_fields
from accel_scale.plugin.preparing import adapt_optimizer, prepare_model
from accel_scale.plugin.replacing import schedules_of
from accel_scale.plugin.trainer_arguments import adapt_arguments
from accel_scale.starting.begin import begin_process
from accel_scale.trainers.guard_mixin import GuardMixin
from accel_scale.trainers.learning_mixin import LearningMixin
from accel_scale.trainers.output_mixin import OutputFolderMixin
from accel_scale.trainers.recovery_mixin import MemoryRecoveryMixin
from accel_scale.trainers.saving_mixin import AtomicSavingMixin
from accel_scale.training.guard.learning import refuse_unlabelled

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from accel_scale.plugin.settings import ScaleSettings


_T = TypeVar("_T")


class ScaleTrainerMixin(LearningMixin, GuardMixin, MemoryRecoveryMixin, OutputFolderMixin, AtomicSavingMixin):
    """Mixin for a trainer class that adds the plugin's settings, its guard, recovery when memory runs out, atomic
    saving, and verification of the first checkpoint.

        class ScaledSFTTrainer(ScaleTrainerMixin, SFTTrainer):
            scale = ScalePlugin(optimizer="adamw_torch_8bit", lr_schedule="wsd")

    Settings that the plugin leaves open keep the trainer's own arguments. `ScalePlugin.trainer` creates such a class.
    """

    scale: ScaleSettings
    flag = "{}"
    _adapter: Any = None  # the plugin's, if the trainer does not apply it itself
    _scaled_optimizer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        begin_process()
        signature = inspect.signature(super().__init__)
        bound = signature.bind_partial(*args, **kwargs)
        training_args = bound.arguments.get("args")
        if training_args is None:
            raise ConfigError(
                "the trainer was made without `args`.", place="ScalePlugin.trainer", fix="pass TrainingArguments."
            )
        with self.scale.in_words_of_fields():
            self._precision = adapt_arguments(self.scale, training_args)
        self._adapter = self.scale.adapter
        if self._adapter is not None and "peft_config" in signature.parameters:
            if bound.arguments.get("peft_config") is not None:
                raise ConfigError(
                    "the script gives the trainer an adapter of its own.",
                    place="ScalePlugin(adapter=)",
                    fix="remove it, or the trainer's peft_config.",
                )
            # The trainer then uses the base as its reference model and keeps no second copy.
            bound.arguments["peft_config"], self._adapter = self._adapter, None
        model: Any = bound.arguments.get("model")
        self._base_parameters = {id(p) for p in model.parameters()} if hasattr(model, "parameters") else set()
        super().__init__(*bound.args, **bound.kwargs)
        for what, rows in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            refuse_unlabelled(rows, what=what, max_length=getattr(self.args, "max_length", None), flag=self.flag)
        self.verify_first_checkpoint = bool(self.scale.verify_first_checkpoint)
        self.guard_settings = self.scale.guard_settings()
        self._check_given()
        self.model = self._prepare(self.model)
        if self._adapter is not None or self.model_wrapped is None:
            self.model_wrapped = self.model

    def train(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        with self.scale.in_words_of_fields():
            return super().train(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with self.scale.in_words_of_fields():
            super().save_model(output_dir, _internal_call)

    def in_user_words(self, advice: str) -> str:
        return in_words_of_fields(advice, self.scale.field_names)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        enable_fp16_on_cpu(self.accelerator)

    def call_model_init(self, trial: Any = None) -> Any:
        """Prepare each new model made for `train` like the first one."""
        model = super().call_model_init(trial)
        is_ready = "accelerator" in vars(self)  # `__init__` calls this too early, and prepares it later
        return self._prepare(model) if is_ready else model

    def get_train_dataloader(self) -> DataLoader[object]:
        loader = super().get_train_dataloader()
        refuse_unpicklable(loader, place="TrainingArguments(dataloader_num_workers=)")
        return loader

    def _prepare(self, model: nn.Module) -> Any:
        with self.scale.in_words_of_fields():
            model = settle_batch_norm(
                model,
                sync=bool(self.scale.sync_batch_norm),
                device_type=self.accelerator.device.type,
                num_processes=self.accelerator.num_processes,
                accumulation=self.args.gradient_accumulation_steps,
                say=self.accelerator.print,
            )
            return prepare_model(
                model,
                strategy=strategy_of(self.accelerator),
                device_type=self.accelerator.device.type,
                precision=self._precision,
                policy=self.scale.policy,
                attention=self.scale.attention,
                adapter=self._adapter,
            )

    def _check_given(self) -> None:
        """Record the optimizer and schedule passed as `Trainer(optimizers=…)`; they are changed as in a plain loop."""
        self._given_optimizer, self._given_schedule = self.optimizer, self.lr_scheduler
        self._given_class = self.optimizer_cls_and_kwargs
        if self._given_optimizer is not None and self.scale.adapter is not None and self.scale.optimizer is None:
            raise ConfigError(
                "the script's optimizer holds the weights that the adapter freezes.",
                place="ScalePlugin(optimizer=)",
                fix="name an optimizer, e.g. adamw_torch_fused.",
            )

    def create_optimizer(self, *args: object, **kwargs: object) -> Any:
        """Create the plugin's optimizer over the groups of the script's optimizer, or over the trainer's."""
        with self.scale.in_words_of_fields():
            return self._create_optimizer(*args, **kwargs)

    def _create_optimizer(self, *args: object, **kwargs: object) -> Any:
        scale = self.scale
        if self.optimizer is None and self._given_optimizer is not None:
            self.optimizer = self._given_optimizer  # dropped when DeepSpeed started
        if type(self.optimizer).__name__ == "DummyOptim" and scale.moves_rates:
            raise ConfigError(
                "DeepSpeed's configuration has an optimizer, and the plugin changes it.",
                place="optimizer in DeepSpeed's configuration",
                fix="remove it there, or the plugin's settings of optimizer, schedule and learning rate.",
            )
        if (
            self.optimizer is not None
            and getattr(self.optimizer, "optimizer", self.optimizer) is self._scaled_optimizer
        ):
            return super().create_optimizer(*args, **kwargs)
        is_scripts = self.optimizer is not None or self._given_class is not None or self._overrides_create_optimizer
        if not is_scripts:
            if scale.optimizer is not None:
                self.optimizer_cls_and_kwargs = self._optimizer_cls_and_kwargs(scale.optimizer)
            self._scaled_optimizer = super().create_optimizer(*args, **kwargs)
            return self._scaled_optimizer
        is_given = self.optimizer is not None
        optimizer = super().create_optimizer(*args, **kwargs)
        self.optimizer = self._scaled_optimizer = self._adapt(optimizer, is_given=is_given)
        return self.optimizer

    @property
    def _overrides_create_optimizer(self) -> bool:
        owners = [cls for cls in type(self).__mro__ if "create_optimizer" in vars(cls)]
        return owners[1] is not Trainer

    def _optimizer_cls_and_kwargs(self, name: str) -> Any:
        from accel_scale.optimization.optimizers import optimizer_cls_and_kwargs

        return optimizer_cls_and_kwargs(
            name,
            self.args,
            optim_args=self.scale.optim_args or {},
            model=self.model,
            device_type=self.accelerator.device.type,
            strategy=strategy_of(self.accelerator).name,
            offload_optimizer=self.scale.launch.parallel.offloads_optimizer,
        )

    def _adapt(self, optimizer: Optimizer, *, is_given: bool) -> Any:
        """Apply the plugin's settings to an optimizer created by the script or its trainer class.

        Args:
            is_given: True if created without the trainer's arguments, which already hold the plugin's learning rate.
        """
        if not self.scale.moves_rates and self.scale.weight_decay is None:
            return optimizer
        is_replaced = self.scale.lr_schedule is not None
        given = [self._given_schedule]
        schedules = [] if is_replaced else schedules_of(optimizer, given, place="Trainer(optimizers=)")
        added: list[Any] = []
        if self.scale.adapter is not None and is_given:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            added = [parameter for parameter in trained if id(parameter) not in self._base_parameters]
        follows_args = not is_given and any(
            float(group["lr"]) == self.args.learning_rate for group in optimizer.param_groups
        )
        return adapt_optimizer(
            self.scale,
            self.accelerator,
            optimizer,
            schedules,
            models=[self.model],
            global_batch_size=0 if follows_args else self._train_batch_size * self._batches_per_step,
            adapter_parameters=added,
            keep_rates=follows_args,
        )

    @property
    def _batches_per_step(self) -> int:
        return self.args.gradient_accumulation_steps * self.args.world_size

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the plugin's schedule over the steps that will actually be taken."""
        scale = self.scale
        if self.lr_scheduler is None and scale.lr_schedule is None:
            self.lr_scheduler = self._given_schedule  # dropped when DeepSpeed started
        if scale.lr_schedule is None or self.lr_scheduler not in (None, self._given_schedule):
            return super().create_scheduler(num_training_steps, optimizer)
        if scale.num_training_steps not in (None, num_training_steps):
            raise ConfigError(
                f"the schedule of {scale.num_training_steps} steps and the {num_training_steps} that will be taken "
                "differ.",
                place="ScalePlugin(num_training_steps=)",
                fix="remove it; a trainer knows its steps.",
            )
        made_for: Any = optimizer or self.optimizer
        schedule: Any = scale.schedule(made_for, num_training_steps)
        self.lr_scheduler, self._created_lr_scheduler = schedule, True
        return schedule


def scaled_trainer_class(trainer_class: type[_T], scale: ScaleSettings) -> type[_T]:
    """Return `trainer_class` with `scale` applied: a new class of the same name, for any HF or TRL trainer."""
    if not issubclass(trainer_class, Trainer):
        raise ConfigError(
            f"{trainer_class.__name__} is not a trainer of transformers or TRL.",
            place="ScalePlugin.trainer",
            fix="give it the class of the trainer, e.g. scale.trainer(SFTTrainer)(…).",
        )
    scaled: Any = type(trainer_class.__name__, (ScaleTrainerMixin, trainer_class), {"scale": scale})
    return scaled
