"""The recipe's defaults: TRL's configuration classes with the few defaults and choices that differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import ModelConfig, SFTConfig

from accel_scale.secrets import move_token_to_environment
from accel_scale.training.arguments import SYNC_EACH_BATCH_HELP
from accel_scale.training.ddp_arguments import DdpHookArguments
from accel_scale.training.optimizers import OPTIMIZER_NAMES
from accel_scale.training.schedules import SCHEDULE_NAMES


@dataclass
class RecipeModelConfig(ModelConfig):
    """TRL's `ModelConfig`; double quantisation is on and the weights' dtype follows ``--precision``."""

    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype the weights are loaded in. Default: what --precision and --method call for.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    use_bnb_nested_quant: bool = field(
        default=True, metadata={"help": "Quantise the quantisation constants too (QLoRA, section 3)."}
    )


@dataclass
class RecipeSFTConfig(DdpHookArguments, SFTConfig):
    """TRL's `SFTConfig` with packing on, every optimizer and schedule of accel-scale as a choice, and quiet output.

    Attributes set after construction: `optimizer_name` and `schedule_name`, as the user wrote them; the base class
    sees the nearest name it knows.
    """

    output_dir: str | None = field(default="outputs/sft", metadata={"help": "Where checkpoints and the result go."})
    optim: str = field(
        default="adamw_torch_fused", metadata={"help": "The optimizer.", "choices": list(OPTIMIZER_NAMES)}
    )
    lr_scheduler_type: str = field(
        default="cosine",
        metadata={
            "help": "Learning rate schedule; wsd is warmup_stable_decay.",
            "choices": list(SCHEDULE_NAMES),
        },
    )
    resume_from_checkpoint: str | None = field(
        default="auto",
        metadata={
            "help": "auto: go on from the newest good checkpoint in --output_dir, if there is one; no: begin anew, "
            "and refuse a folder with leftovers; or the path of a checkpoint."
        },
    )
    packing: bool = field(
        default=True,
        metadata={"help": "Pack documents into rows of --max_length; attention never crosses documents."},
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide NaN losses from the log; off, so that they are seen."}
    )
    collective_timeout: str | None = field(
        default=None,
        metadata={
            "help": "How long ranks wait for one another, e.g. 10m, before the run ends and says which is missing "
            "and where. Default: --ddp_timeout."
        },
    )
    disable_tqdm: bool | None = field(default=False, metadata={"help": "No progress bar, not even on a terminal."})
    sync_each_batch: bool = field(default=False, metadata={"help": SYNC_EACH_BATCH_HELP})
    gradient_checkpointing: bool | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "TRL's switch for activation checkpointing; --checkpointing_policy says more.",
            "nargs": "?",
            "const": True,
        },
    )

    def __post_init__(self) -> None:
        from accel_scale.training.collective_timeout import settle_timeouts

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
            config: Any = self.accelerator_config  # the base class has read it from whatever it was
            config.gradient_accumulation_kwargs = {
                **(config.gradient_accumulation_kwargs or {}),
                "sync_each_batch": True,
            }

    def _validate_args(self) -> None:
        """As the base class, except that bf16 is allowed on a CPU."""
        import torch

        from accel_scale.launching.rehearsal import validate_on_cpu

        if torch.accelerator.is_available():
            super()._validate_args()
        else:
            validate_on_cpu(self, super()._validate_args)

    def to_dict(self) -> dict[str, Any]:
        """As the base class, with the names the user wrote."""
        return {**super().to_dict(), "optim": self.optimizer_name, "lr_scheduler_type": self.schedule_name}
