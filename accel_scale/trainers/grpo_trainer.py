"""TRL's `GRPOTrainer` and `RLOOTrainer` with the recipes' additions."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer, RLOOTrainer

from accel_scale.errors import ConfigError
from accel_scale.settings.trl_config import RecipeGRPOConfig, RecipeRLOOConfig
from accel_scale.trainers.sft_trainer import OwnLossBase
from accel_scale.training.guard.learning import NothingLearnt

# Minimum optimizer steps for judging rewards that never differed; a rehearsal has fewer.
_STEPS_WITHOUT_REWARD = 8


class RewardedBase(OwnLossBase):
    """`OwnLossBase` for trainers that generate answers and train on their rewards.

    Attributes:
        answer_sizes: Tokens of the longest prompt and of the longest answer in the last micro-batch.
    """

    args: RecipeGRPOConfig | RecipeRLOOConfig
    _step: int
    answer_sizes: tuple[int, int] = (0, 0)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_callback(_InStep(self))

    def refuse_rows(self) -> None:
        """Refuse fewer prompts than one generation batch takes: TRL leaves out rows that do not fill a batch."""
        needed = (self.args.generation_batch_size or 0) // (self.args.num_generations or 1)
        num_rows = self.train_dataset.num_rows if isinstance(self.train_dataset, Dataset) else needed
        if num_rows < needed:
            raise ConfigError(
                f"{num_rows} prompts do not fill one batch of {needed}.",
                place="--dataset_name",
                fix="use more rows, a smaller batch, or a larger --num_generations.",
            )

    def num_tokens_of(self, batch: object) -> int:
        """Zero, because nothing has been generated for a batch of prompts yet; `_prepare_inputs` counts."""
        return 0

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        inputs: dict[str, torch.Tensor] = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self.meter.add_tokens(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())
            self.answer_sizes = inputs["prompt_mask"].shape[1], inputs["completion_mask"].shape[1]
        return inputs

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train; raise an error if no two answers to a prompt were ever rewarded differently."""
        result: TrainOutput = super().train(*args, **kwargs)
        alike = [entry["frac_reward_zero_std"] for entry in self.state.log_history if "frac_reward_zero_std" in entry]
        if self.state.global_step >= _STEPS_WITHOUT_REWARD and alike and min(alike) == 1.0:
            raise NothingLearnt(
                f"all {self.args.num_generations} answers to each prompt had the same reward in every step, so "
                "nothing was learnt.",
                place="--rewards",
                fix="start from a model that sometimes earns it, reward parts of it too, raise --temperature or "
                "--num_generations.",
            )
        return result

    def figures(self) -> dict[str, object]:
        return {**super().figures(), "rewards": [e["reward"] for e in self.state.log_history if "reward" in e]}

    @property
    def steps_per_cycle(self) -> int:
        """Optimizer steps that share one generation, at least 1."""
        per_generation = int(self.args.steps_per_generation or 1) * int(self.args.num_iterations)
        return max(1, per_generation // self.args.gradient_accumulation_steps)


class ScaleGRPOTrainer(RewardedBase, GRPOTrainer):
    """`GRPOTrainer` that applies the settings of `resolve`; arguments as for `OwnLossBase`."""

    args: RecipeGRPOConfig
    program = "grpo.py"


class ScaleRLOOTrainer(RewardedBase, RLOOTrainer):
    """`RLOOTrainer` that applies the settings of `resolve`; arguments as for `OwnLossBase`."""

    args: RecipeRLOOConfig
    program = "rloo.py"


class _InStep(TrainerCallback):
    """Sets a resumed run's count of micro-batches, so that it generates at the same steps."""

    def __init__(self, trainer: RewardedBase) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        trainer = self._trainer
        trainer._step = state.global_step * trainer.args.gradient_accumulation_steps
        if state.global_step % trainer.steps_per_cycle and state.is_world_process_zero:
            print(
                f"note: {trainer.steps_per_cycle} steps share what is generated, and the run goes on within them: the "
                "rest of them is generated anew.",
                flush=True,
            )
