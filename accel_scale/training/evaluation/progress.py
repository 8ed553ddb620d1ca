"""A trainer's progress on the console, and its metrics in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from accel_scale.measuring.meters import ThroughputMeter, peak_memory_bytes
from accel_scale.reporting.metrics_log import MetricsLog
from accel_scale.reporting.run_starts import write_start
from accel_scale.reporting.step_lines import StepFigures, StepLines

Logs = dict[str, float] | None


class ProgressLines(TrainerCallback):
    """Replaces transformers' bar and its dict per log line by `StepLines`, on one process.

    Args:
        tokens_per_second: Rate over all ranks; None while it is not known.
        bar: True to show a bar on a terminal.
    """

    def __init__(self, tokens_per_second: Callable[[], float | None], *, bar: bool = True) -> None:
        self._tokens_per_second, self._bar = tokens_per_second, bar
        self._lines: StepLines | None = None
        self._num_skipped = 0

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if state.is_world_process_zero:
            self._lines = StepLines(state.max_steps, first_step=state.global_step, bar=self._bar)

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._lines is not None:
            self._lines.stepped(state.global_step)

    def on_log(self, args: object, state: object, control: object, logs: Logs = None, **kwargs: object) -> None:
        if self._lines is None or not logs:
            return
        self._num_skipped += int(logs.get("skipped_steps", 0))
        if "loss" in logs:
            rate = logs.get("learning_rate")
            figures = StepFigures(
                float(logs["loss"]),
                learning_rate=None if rate is None else float(rate),
                tokens_per_second=self._tokens_per_second(),
                memory_bytes=peak_memory_bytes(),
                skipped_steps=self._num_skipped,
            )
            self._lines.log(figures)
        if "eval_loss" in logs:
            self._lines.say(f"evaluation loss {float(logs['eval_loss']):.4f}")

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self._lines is not None:
            self._lines.close()


class MeterCallback(TrainerCallback):
    """Tells the meter that an optimizer step has ended, before logging, evaluation and saving start."""

    def __init__(self, meter: ThroughputMeter) -> None:
        self._meter = meter

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        # transformers' own callback, which decides what follows a step, runs first.
        follows = control.should_log or control.should_evaluate or control.should_save or control.should_training_stop
        self._meter.end_step(settle=follows or state.global_step >= state.max_steps)


class MetricsCallback(TrainerCallback):
    """Writes every number that the trainer logs to ``metrics.jsonl`` in the output folder during training."""

    def __init__(self) -> None:
        self._log: MetricsLog | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._log = MetricsLog(str(args.output_dir), state.is_world_process_zero, resumed_step=state.global_step)

    def on_log(self, args: object, state: TrainerState, control: object, logs: Logs = None, **kwargs: object) -> None:
        # The last entry summarises the run ("train_loss"); `run_summary.json` has that.
        if self._log is not None and logs and ("loss" in logs or any(name.startswith("eval_") for name in logs)):
            self._log.write(state.global_step, **{k: float(v) for k, v in logs.items() if v is not None})


class StartCallback(TrainerCallback):
    """Records in ``run_starts.jsonl`` that a run starts or resumes, and its settings; for one process."""

    def __init__(self, content: Mapping[str, object]) -> None:
        self._content = content

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        write_start(
            str(args.output_dir), step=state.global_step, content={**self._content, "num_steps": state.max_steps}
        )


def show_progress(trainer: Trainer, tokens_per_second: Callable[[], float | None]) -> None:
    """Replace the trainer's printing callbacks by `ProgressLines`; ``--disable_tqdm`` leaves out the bar."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressLines(tokens_per_second, bar=not trainer.args.disable_tqdm))
