"""State of this rank: step, phase and collective from the Python stack, and the beat that tells other ranks."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType

# Frames from the outermost in: the first known one determines the phase of a step. (end or part of the file's path,
# function or None for any, phase)
_PHASES: tuple[tuple[str, str | None, str], ...] = (
    ("accel_scale/data/", None, "data"),
    ("torch/utils/data/", None, "data"),
    ("accelerate/data_loader.py", None, "data"),
    ("trainer.py", "get_batch_samples", "data"),
    ("accel_scale/training/evaluation/validation.py", "evaluate_loss", "evaluation"),
    ("accel_scale/training/evaluation/validation.py", "sample_text", "evaluation"),
    ("accel_scale/training/evaluation/exact_match.py", None, "evaluation"),
    ("transformers/trainer.py", "evaluate", "evaluation"),
    ("accel_scale/training/checkpoints/manager.py", "save", "checkpoint"),
    ("accel_scale/training/checkpoints/manager.py", "resume", "resuming"),
    ("accel_scale/training/saving/final_model.py", None, "saving the model"),
    ("transformers/trainer.py", "_save_checkpoint", "checkpoint"),
    ("transformers/trainer.py", "save_model", "saving the model"),
    ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
    ("deepspeed/runtime/engine.py", "backward", "backward"),
    ("accel_scale/training/guard/optimizer_control.py", "clip", "gradient norm"),
    ("accel_scale/training/guard/deepspeed_control.py", "clip", "gradient norm"),
    ("accelerate/accelerator.py", "clip_grad_norm_", "gradient norm"),
    ("torch/optim/", "step", "optimizer step"),
    ("deepspeed/runtime/engine.py", "step", "optimizer step"),
    ("torch/nn/modules/module.py", "_call_impl", "forward"),
    ("accelerate/accelerator.py", "prepare", "preparing the model"),
    ("transformers/modeling_utils.py", "from_pretrained", "loading the model"),
)
_COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"
# FSDP2 and functional collectives start a collective in one place and wait for it in another.
_WAITS = {
    "foreach_all_gather_copy_out": "all_gather",
    "wait_for_unshard": "all_gather",
    "foreach_reduce": "reduce_scatter",
    "wait_tensor": "a collective",
}
_ALIASES = {
    "all_gather_into_tensor": "all_gather",
    "_all_gather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "monitored_barrier": "barrier",
}
COLLECTIVES = {
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "reduce", "gather", "scatter", "all_to_all",
    "send", "recv",
}  # fmt: skip

Spot = tuple[str, str]  # a frame's file and function


@dataclass(frozen=True)
class Beat:
    """The last reported state of a rank.

    Attributes:
        step: Its current optimizer step; 0 before the first.
        phase: Part of the step: data, forward, backward …
        operation: The collective it is in; None outside of one.
        progress: Grows with every collective begun, and with the step.
        still_seconds: For how long none of the above has changed.
        count: Number of beats so far; if it stops growing, the process is stopped or gone.
        clock: Seconds since the epoch by the rank's own clock.
    """

    rank: int
    step: int
    phase: str
    operation: str | None
    progress: int
    still_seconds: float
    count: int
    clock: float

    def as_json(self) -> str:
        """Serialize for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """Parse the result of `as_json`."""
        return cls(**json.loads(text))


def locate(stack: Sequence[Spot]) -> tuple[str, str | None]:
    """Phase and collective of a stack, outermost frame first; ``"other"`` if no frame is known."""
    phase = "other"
    for file, function in stack:
        found = next((p for part, name, p in _PHASES if part in file and name in (None, function)), None)
        if found is not None:
            phase = found
            break
    operation = None
    for file, function in reversed(stack):  # all_gather_object calls all_gather: the innermost one is waited for
        name = _ALIASES.get(function, function)
        if file.endswith(_COLLECTIVES_FILE) and name in COLLECTIVES:
            operation = name
            break
        if "torch/distributed/" in file and function in _WAITS:
            operation = _WAITS[function]
            break
    return phase, operation


def stacks(of: Iterable[threading.Thread]) -> list[list[Spot]]:
    """The stacks of threads, outermost frame first; keeps no frames alive."""
    frames = sys._current_frames()
    return [_spots(frames[thread.ident]) for thread in of if thread.ident in frames]


def _spots(frame: FrameType | None) -> list[Spot]:
    spots: list[Spot] = []
    while frame is not None:
        spots.append((frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name))
        frame = frame.f_back
    return spots[::-1]
