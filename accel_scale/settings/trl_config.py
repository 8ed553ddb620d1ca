"""TRL's configuration classes with the recipe's flags and defaults from `accel_scale.flags.sft`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl import DPOConfig, GRPOConfig, KTOConfig, ModelConfig, RewardConfig, RLOOConfig, SFTConfig

from accel_scale.flags.ddp import DdpHookArguments
from accel_scale.flags.sft import (
    DPODefaults,
    GRPODefaults,
    KTODefaults,
    ModelDefaults,
    RewardDefaults,
    RLOODefaults,
    SFTDefaults,
    VisionDefaults,
)
from accel_scale.secrets import move_token_to_environment, without_secrets

if TYPE_CHECKING:
    from transformers import TrainingArguments

    _TrainingArguments = TrainingArguments
else:
    _TrainingArguments = object


@dataclass
class RecipeModelConfig(ModelDefaults, ModelConfig):
    """TRL's `ModelConfig` with the recipe's defaults."""


class _TrainerSettings(_TrainingArguments):
    """Changes that the recipes make to every configuration of TRL's trainers; must come before it among the bases.

    Attributes set after construction: `optimizer_name` and `schedule_name`, as the user wrote them; the base class
    gets a name that it knows.
    """

    sync_each_batch: bool  # a flag of the recipe

    def __post_init__(self) -> None:
        from accel_scale.training.resilience.collective_timeout import settle_timeouts

        settle_timeouts(self)
        from transformers.trainer_utils import SchedulerType
        from transformers.training_args import OptimizerNames

        self.optimizer_name: str = str(getattr(self.optim, "value", self.optim))
        self.schedule_name: str = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        if self.optimizer_name not in {o.value for o in OptimizerNames}:
            self.optim = "adamw_torch"
        if self.schedule_name not in {s.value for s in SchedulerType}:
            self.lr_scheduler_type = "warmup_stable_decay"
        super().__post_init__()
        move_token_to_environment(self)
        if self.sync_each_batch:
            config: Any = self.accelerator_config  # parsed by the base class from whatever it was
            config.gradient_accumulation_kwargs = {
                **(config.gradient_accumulation_kwargs or {}),
                "sync_each_batch": True,
            }

    def _validate_args(self) -> None:
        """Like the base class, except that bf16 is allowed on a CPU."""
        import torch

        from accel_scale.launching.rehearsal import validate_on_cpu

        if torch.accelerator.is_available():
            super()._validate_args()
        else:
            validate_on_cpu(self, super()._validate_args)

    def to_dict(self) -> dict[str, Any]:
        """Like the base class, but with the names that the user wrote and without credentials, for trackers."""
        known = {**super().to_dict(), "optim": self.optimizer_name, "lr_scheduler_type": self.schedule_name}
        return dict(without_secrets(known))


@dataclass
class RecipeSFTConfig(_TrainerSettings, SFTDefaults, DdpHookArguments, SFTConfig):  # type: ignore[misc]  # one flag more may be None
    """TRL's `SFTConfig` with the recipe's flags and defaults."""


@dataclass
class RecipeDPOConfig(_TrainerSettings, DPODefaults, DdpHookArguments, DPOConfig):  # type: ignore[misc]
    """TRL's `DPOConfig` with the recipe's flags and defaults."""


@dataclass
class RecipeKTOConfig(_TrainerSettings, KTODefaults, DdpHookArguments, KTOConfig):  # type: ignore[misc]
    """TRL's `KTOConfig` with the recipe's flags and defaults."""


@dataclass
class RecipeGRPOConfig(_TrainerSettings, GRPODefaults, DdpHookArguments, GRPOConfig):  # type: ignore[misc]
    """TRL's `GRPOConfig` with the recipe's flags and defaults."""


@dataclass
class RecipeRLOOConfig(_TrainerSettings, RLOODefaults, DdpHookArguments, RLOOConfig):  # type: ignore[misc]
    """TRL's `RLOOConfig` with the recipe's flags and defaults."""


@dataclass
class RecipeRewardConfig(_TrainerSettings, RewardDefaults, DdpHookArguments, RewardConfig):  # type: ignore[misc]
    """TRL's `RewardConfig` with the recipe's flags and defaults."""


@dataclass
class RecipeVisionConfig(_TrainerSettings, VisionDefaults, DdpHookArguments, SFTConfig):  # type: ignore[misc]
    """TRL's `SFTConfig` with the flags and defaults of rows with images."""


RecipeConfig = (
    RecipeSFTConfig
    | RecipeDPOConfig
    | RecipeKTOConfig
    | RecipeGRPOConfig
    | RecipeRLOOConfig
    | RecipeRewardConfig
    | RecipeVisionConfig
)
