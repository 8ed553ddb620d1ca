"""Transformers' tracker callbacks: the same names in every tracker, and TensorBoard's writers for events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.integrations import MLflowCallback

from accel_scale.reporting.trackers import TextWriter, tracked_names

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class NamedMLflowCallback(MLflowCallback):
    """Logs ``train/loss`` and ``eval/loss`` to MLflow, for which transformers 5.23 uses ``loss`` and ``eval_loss``."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: object = None,
        **kwargs: object,
    ) -> None:
        super().on_log(args, state, control, logs=tracked_names(logs or {}), model=model, **kwargs)


def use_tracker_names(trainer: Trainer) -> None:
    """Replace the trainer's MLflow callback, if it has one."""
    if any(type(callback) is MLflowCallback for callback in trainer.callback_handler.callbacks):
        trainer.remove_callback(MLflowCallback)
        trainer.add_callback(NamedMLflowCallback())


def text_writers(trainer: Trainer) -> list[TextWriter]:
    """The TensorBoard writers of the trainer's callbacks."""
    writers = (getattr(callback, "tb_writer", None) for callback in trainer.callback_handler.callbacks)
    return [writer for writer in writers if writer is not None]
