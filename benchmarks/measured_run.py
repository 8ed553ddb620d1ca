"""Run an unmodified training script and record the end of each step (wall and CPU seconds), its tokens and memory.

On a GPU wall time is the device's: a step ends when the device reaches an event, not when the host has launched it.

    python benchmarks/measured_run.py report.json path/to/script.py --flags of --the script

A callback is added to the default ones of every transformers `Trainer`; the script is not changed. Tokens without
padding are those that the trainer logs as `num_tokens`, or those of its batches if it logs none.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def peak_resident_bytes() -> int:
    """High-water mark of resident memory since it was last reset. Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_peak_resident_bytes() -> None:
    """Reset the high-water mark to the current resident memory (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def count_tokens(input_ids: Any, pad_token_id: int) -> int:
    """Number of tokens in a batch without padding."""
    return int((input_ids != pad_token_id).sum())


def add_recorder(report: dict[str, Any]) -> None:
    """Make every `Trainer` of this process write its steps, logs and memory into `report`."""
    import torch
    from transformers import TrainerCallback, trainer

    from accel_scale.measuring.meters import clock_of, peak_device_bytes

    clock, marks = clock_of("cuda" if torch.cuda.is_available() else "cpu"), []
    seen = 0
    training_step = trainer.Trainer.training_step

    def counted(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += count_tokens(inputs["input_ids"], self.processing_class.pad_token_id)
        return training_step(self, model, inputs, *args, **kwargs)

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            reset_peak_resident_bytes()
            report.update(steps=[], logs=[], resident_bytes_before=peak_resident_bytes())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append(clock.mark())
            report["steps"].append([state.global_step, 0.0, time.process_time()])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                report["logs"].append([state.global_step, logs.get("num_tokens", seen), logs["loss"]])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.now()  # all marks have been reached
            for step, mark in zip(report["steps"], marks, strict=True):
                step[1] = clock.between(marks[0], mark)
            report["peak_resident_bytes"] = peak_resident_bytes()
            report["peak_device_bytes"] = (peak_device_bytes() or {}).get("allocated_bytes")

    # A list that `Trainer.__init__` copies (checked on transformers 5.23); an empty report shows if it moves.
    trainer.DEFAULT_CALLBACKS.append(Recorder)
    trainer.Trainer.training_step = counted


class WhenTrainerIsImported(importlib.abc.MetaPathFinder):
    """Calls a function once the script has imported transformers' trainer, without importing anything before."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that calls the function after executing the module."""
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def run_script(script: str, flags: list[str]) -> None:
    """Run a script as python does; returns if it exits with status 0."""
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


def main() -> None:
    """Entry point; all arguments after the script's path belong to the script."""
    report_path, script, *flags = sys.argv[1:]
    report: dict[str, Any] = {}
    if "transformers.trainer" in sys.modules:  # already imported before the script
        add_recorder(report)
    else:
        sys.meta_path.insert(0, WhenTrainerIsImported(lambda: add_recorder(report)))
    sys.path[0] = str(Path(script).resolve().parent)
    run_script(script, flags)
    if not report.get("logs"):
        raise RuntimeError(f"{script} logged no step with a loss.")
    Path(report_path).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
