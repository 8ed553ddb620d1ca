"""TRL's `RewardTrainer` with the recipes' additions."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from peft import PeftConfig, get_peft_model
from transformers import PreTrainedModel
from trl import RewardTrainer

from accel_scale.settings.trl_config import RecipeRewardConfig
from accel_scale.trainers.sft_trainer import OwnLossBase
from accel_scale.training.guard.learning import no_labels

_ACCURACY = "eval_accuracy"


class ScaleRewardTrainer(OwnLossBase, RewardTrainer):
    """`RewardTrainer` that applies the settings of `resolve`; arguments as for `OwnLossBase`.

    Call `transformers.set_seed` before loading the model, as TRL does, because the head starts with random weights.
    Adapters are added here, because TRL would set the seed again in between.

    Attributes:
        left_out: Number of training pairs left out because an answer is longer than ``--max_length``.
    """

    args: RecipeRewardConfig
    program = "reward.py"
    left_out: int = 0

    def __init__(self, *, model: PreTrainedModel, peft_config: PeftConfig | None = None, **kwargs: Any) -> None:
        self._num_given = _length(kwargs["train_dataset"])
        # The recipe casts adapters to their training dtype.
        trained = get_peft_model(model, peft_config, autocast_adapter_dtype=False) if peft_config else model
        super().__init__(model=trained, **kwargs)

    def refuse_rows(self) -> None:
        """Report the pairs longer than ``--max_length`` that TRL has left out; raise an error if none is left."""
        for what, rows in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            if rows is not None and _length(rows) == 0:
                raise no_labels(f"no {what} row", self.args.max_length, "--{}")
        self.left_out = (self._num_given or 0) - (_length(self.train_dataset) or 0)
        if self.left_out and self.is_world_process_zero():
            print(
                f"note: {self.left_out:,} of {self._num_given:,} pairs are left out, of which an answer has more than "
                f"--max_length {self.args.max_length} tokens.",
                flush=True,
            )

    def figures(self) -> dict[str, object]:
        """The common figures, plus the share of pairs whose better answer has the higher reward.

        For the pairs trained on, per log entry; for evaluated pairs, before the first step, if done then, and last.
        """
        history = self.state.log_history
        first = next((e for e in history if _ACCURACY in e and e["step"] == 0), {})
        last = next((e for e in reversed(history) if _ACCURACY in e and e["step"] > 0), {})
        return {
            **super().figures(),
            "preferred": [entry["accuracy"] for entry in history if "accuracy" in entry],
            "ranked": {"before": first.get(_ACCURACY), "after": last.get(_ACCURACY), "step": last.get("step")},
            "left_out": self.left_out,
        }


def _length(rows: object) -> int | None:
    """Number of rows of a data set; None for a stream."""
    return rows.num_rows if isinstance(rows, Dataset) else None
