"""Ends a trainer's run with an error if it learned nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState

from accel_scale.modeling.gathering import gather_values
from accel_scale.optimization.loss import count_loss_tokens
from accel_scale.training.guard.learning import WeightsBefore, no_labels, refuse_unlearnt

if TYPE_CHECKING:
    from datasets import Dataset

# Optimizer steps without any label after which a run on a stream is given up.
_STEPS_WITHOUT_LABELS = 8


def _is_zero_everywhere(count: Any) -> bool:
    """True if all processes that have counted counted zero; False if none has counted. Collective."""
    counts = [each for each in gather_values(None if count is None else int(count)) if each is not None]
    return bool(counts) and not any(counts)


def _was_looked_through(dataset: Dataset) -> bool:
    """True if `refuse_unlabelled` can check all its rows."""
    from datasets import Dataset

    return isinstance(dataset, Dataset)


class LearningMixin:
    """Mixin for an HF or TRL trainer class: `train` raises an error if nothing was learnt.

    Missing labels and unchanged weights are errors only if batches have labels: a reward may well be zero.

    Attributes:
        flag: Format of a setting's name where the user sets it.
    """

    flag: str = "--{}"
    _before: WeightsBefore | None = None
    _first_step = 0
    _num_labelled: Any = None
    _evaluated: torch.Tensor | None = None  # labelled tokens, batches, batches without a label, on this rank
    _num_batches = 0
    _is_empty = _has_labels = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        trainer.add_callback(_Begin(self))
        try:
            result = super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            trainer.remove_callback(_Begin)
        self._refuse_unlearnt()
        return result

    def begin(self, step: int) -> None:
        """Call when everything is prepared and a checkpoint's weights are loaded."""
        trainer: Any = self
        self._first_step, self._num_labelled, self._num_batches = step, None, 0
        self._is_empty = self._has_labels = False
        self._before = WeightsBefore.of(trainer.model)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._is_empty = self._num_batches == 0 and not batches
        self._num_batches += len(batches)
        if batches and isinstance(batches[0], Mapping) and "labels" in batches[0]:
            self._has_labels = True
        if num_items is not None:  # a tensor stays on its device
            self._num_labelled = num_items if self._num_labelled is None else self._num_labelled + num_items
        rows = getattr(self, "train_dataset", None)
        if self._steps_seen == _STEPS_WITHOUT_LABELS and not _was_looked_through(rows):
            self._refuse_unlabelled()
        return batches, num_items

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        result = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if isinstance(labels, torch.Tensor):
            count = count_loss_tokens(labels, shift=labels.dim() > 1)
            loss = result[0] if isinstance(result, tuple) and isinstance(result[0], torch.Tensor) else torch.ones(())
            is_no_loss = (count == 0) & (loss == 0).all().to(count.device)
            counts = torch.stack([count, torch.ones_like(count), is_no_loss.to(count.dtype)])
            self._evaluated = counts if self._evaluated is None else self._evaluated + counts
        return result

    def evaluation_loop(self, dataloader: object, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, but give a batch without labels no loss, instead of a loss of 0 that lowers the mean.

        For a stream, missing labels are known only after its rows have been read.
        """
        trainer: Any = self
        self._evaluated = None
        result = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        counts = gather_values(None if self._evaluated is None else self._evaluated.tolist())
        counted = [each for each in counts if each is not None]
        if not counted:
            return result
        num_labelled, num_batches, num_without = map(sum, zip(*counted, strict=True))
        if not _was_looked_through(getattr(dataloader, "dataset", None)) and num_labelled == 0:
            raise no_labels("no evaluation row", getattr(trainer.args, "max_length", None), self.flag)
        mean = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if 0 < num_without < num_batches and mean in result.metrics:
            result.metrics[mean] *= num_batches / (num_batches - num_without)
        return result

    @property
    def _steps_seen(self) -> int:
        trainer: Any = self
        return int(trainer.state.global_step - self._first_step)

    def _refuse_unlabelled(self) -> None:
        trainer: Any = self
        if _is_zero_everywhere(self._num_labelled):
            rows = f"no row of the first {self._steps_seen} steps"
            raise no_labels(rows, getattr(trainer.args, "max_length", None), self.flag)

    def _refuse_unlearnt(self) -> None:
        trainer: Any = self
        if self._before is None or (self._steps_seen == 0 and not self._is_empty):
            return  # a finished run, or one that was asked to stop at once
        if self._steps_seen:
            self._refuse_unlabelled()
        guard, skipped = getattr(trainer, "guard", None), getattr(trainer, "skipped", {})
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        refuse_unlearnt(
            trainer.model,
            before=self._before,
            num_steps=self._steps_seen,
            must_change=self._has_labels,
            **skipped,
            last_loss=(losses[-1] or None) if losses and guard is None else None,
            flag=self.flag,
        )


class _Begin(TrainerCallback):
    """Tells a `LearningMixin` that training begins."""

    def __init__(self, trainer: LearningMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._trainer.begin(state.global_step)
