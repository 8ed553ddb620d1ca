"""TRL's `SFTTrainer`, `DPOTrainer` and `KTOTrainer` with saving, the guard, recovery and meters of the recipes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel
from trl import DPOTrainer, KTOTrainer, SFTTrainer

from accel_scale.optimization.fast_loss import FastLossMixin
from accel_scale.settings.trl_config import RecipeDPOConfig, RecipeKTOConfig, RecipeSFTConfig
from accel_scale.trainers.ddp_mixin import DdpHookMixin
from accel_scale.trainers.guard_mixin import GuardMixin
from accel_scale.trainers.learning_mixin import LearningMixin
from accel_scale.trainers.output_mixin import OutputFolderMixin
from accel_scale.trainers.recipe_mixin import RecipeTrainerMixin
from accel_scale.trainers.recovery_mixin import MemoryRecoveryMixin
from accel_scale.trainers.saving_mixin import AtomicSavingMixin
from accel_scale.trainers.sequence_mixin import SequenceParallelMixin
from accel_scale.training.guard.learning import no_labels, refuse_unlabelled


class _SFTBase(
    RecipeTrainerMixin,
    LearningMixin,
    SequenceParallelMixin,
    GuardMixin,
    MemoryRecoveryMixin,
    DdpHookMixin,
    OutputFolderMixin,
    AtomicSavingMixin,
    FastLossMixin,
):
    """The mixins that precede TRL's own methods, in this order."""


class ScaleSFTTrainer(_SFTBase, SFTTrainer):
    """`SFTTrainer` that applies the settings of `resolve`.

    Args:
        loss_from_logits: Compute the loss from the model's own logits, as the start check may request.
        skips_unlabelled: Compute the last layer for labelled tokens only, if the start check allows it.
        **kwargs: Arguments of `RecipeTrainerMixin` and `SFTTrainer`, and `sp_size` of `SequenceParallelMixin`.
    """

    args: RecipeSFTConfig

    def __init__(
        self,
        *,
        loss_from_logits: bool = False,
        skips_unlabelled: bool = False,
        program: str = "sft.py",
        **kwargs: Any,
    ) -> None:
        self.loss_from_logits, self.skips_unlabelled = loss_from_logits, skips_unlabelled
        super().__init__(program=program, **kwargs)

    def refuse_rows(self) -> None:
        for what, rows in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            refuse_unlabelled(rows, what=what, max_length=self.args.max_length)


class OwnLossBase(
    RecipeTrainerMixin,
    LearningMixin,
    GuardMixin,
    MemoryRecoveryMixin,
    DdpHookMixin,
    OutputFolderMixin,
    AtomicSavingMixin,
):
    """`_SFTBase` for trainers with a loss of TRL's own; rows are not shared by several ranks.

    Args:
        optimizer_cls_and_kwargs: Same as in transformers' `Trainer`; TRL's trainers do not take it.
        **kwargs: Arguments of `RecipeTrainerMixin`, except `program`, and of TRL's trainer.

    Attributes:
        program: The recipe's name in messages.
    """

    program: str

    def __init__(
        self, *, optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, object]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(program=self.program, **kwargs)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs


class _ReferenceBase(OwnLossBase):
    """`OwnLossBase` for losses that compare with a reference."""

    args: RecipeDPOConfig | RecipeKTOConfig
    ref_model: PreTrainedModel | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.args.precompute_ref_log_probs:
            self.ref_model = None  # its log probabilities are in the rows by now

    def refuse_rows(self) -> None:
        """Raise an error if no row is left; TRL has left out rows whose prompts alone fill ``--max_length``."""
        for what, rows in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            if rows is not None and hasattr(rows, "__len__") and not len(rows):
                raise no_labels(f"no {what} row", self.args.max_length, "--{}")


class ScaleDPOTrainer(_ReferenceBase, DPOTrainer):
    """`DPOTrainer` that applies the settings of `resolve`; arguments as for `OwnLossBase`."""

    args: RecipeDPOConfig
    program = "dpo.py"

    def figures(self) -> dict[str, object]:
        """The common figures, plus the share of pairs whose better answer gains more over the reference."""
        preferred = [e["rewards/accuracies"] for e in self.state.log_history if "rewards/accuracies" in e]
        return {**super().figures(), "preferred": preferred}


class ScaleKTOTrainer(_ReferenceBase, KTOTrainer):
    """`KTOTrainer` that applies the settings of `resolve`; arguments as for `OwnLossBase`."""

    args: RecipeKTOConfig
    program = "kto.py"

    def figures(self) -> dict[str, object]:
        """The common figures, plus the margin of rewards of good over bad answers, if a log entry had both."""
        margins = [e["rewards/margins"] for e in self.state.log_history if "rewards/margins" in e]
        return {**super().figures(), "margins": margins}

    def _compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool) -> object:
        """Compute TRL's loss, but gather everything (the KL term and logged figures) in fp32 on all ranks.

        On a rank without a good answer, or without a bad one, TRL 1.16 sums rewards from an empty fp32 tensor; under
        bf16 the other ranks' rewards are not fp32, and ranks would exchange tensors of different sizes.
        """
        gather = self.accelerator.gather_for_metrics

        def in_fp32(values: torch.Tensor) -> torch.Tensor:
            return gather(values.float() if values.is_floating_point() else values)

        self.accelerator.gather_for_metrics = in_fp32
        try:
            return super()._compute_loss(model, inputs, return_outputs)
        finally:
            self.accelerator.gather_for_metrics = gather
