"""One progress bar with the figures that matter, on one process, and nothing where no one is looking."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from accel_scale.reporting.metrics_log import MetricsLog
from accel_scale.training.meters import ThroughputMeter


class QuietProgress(ProgressCallback):
    """transformers' progress bar, with loss and learning rate beside it instead of a dict per log line."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs and "loss" in logs:
            shown = {"loss": f"{float(logs['loss']):.4f}"}
            if "learning_rate" in logs:
                shown["lr"] = f"{float(logs['learning_rate']):.2e}"
            self.training_bar.set_postfix(shown)


class MeterCallback(TrainerCallback):
    """Tells the meter when an optimizer step has ended, before logging, evaluation and saving begin."""

    def __init__(self, meter: ThroughputMeter) -> None:
        self._meter = meter

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.end_step()


class MetricsCallback(TrainerCallback):
    """Writes every number that the trainer logs to ``metrics.jsonl`` in the output folder, while it trains."""

    def __init__(self) -> None:
        self._log: MetricsLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log = MetricsLog(args.output_dir, state.is_world_process_zero, resumed_step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # The last entry sums the run up ("train_loss"); `run_summary.json` does that.
        if self._log is not None and logs and ("loss" in logs or any(name.startswith("eval_") for name in logs)):
            self._log.write(state.global_step, **{name: float(value) for name, value in logs.items()})


def quiet_progress(trainer: Trainer) -> None:
    """Replace the trainer's printing callbacks by `QuietProgress`, and by nothing when stderr is no terminal."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if sys.stderr.isatty() and not trainer.args.disable_tqdm:
        trainer.add_callback(QuietProgress)
