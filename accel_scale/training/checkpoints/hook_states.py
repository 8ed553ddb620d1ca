"""The state of DDP's communication hooks in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.training.checkpoints.contents import host_copy, numbered, write_tensors
from accel_scale.training.checkpoints.pickles import load_safely
from accel_scale.training.ddp.hooks import STATE_FILE, hook_of

if TYPE_CHECKING:
    from accelerate import Accelerator


def capture_hook_states(accelerator: Accelerator, *, copy: bool) -> Any:
    """Return a function that writes this rank's hook states into a folder, one file for each model that has one."""
    hooks = [hook_of(model) for model in accelerator._models]
    states = [host_copy(hook.state_dict(), copy=copy) if hook and hook.is_stateful else None for hook in hooks]
    name = STATE_FILE.format(rank=accelerator.process_index)

    def write(folder: Path) -> None:
        for index, state in enumerate(states):
            if state is not None:
                write_tensors(state, folder / numbered(name, index))

    return write


def load_hook_states(accelerator: Accelerator, folder: Path) -> None:
    """Load the states that `capture_hook_states` wrote on all ranks; a hook without a file starts afresh."""
    for index, model in enumerate(accelerator._models):
        hook = hook_of(model)
        if hook is None or not hook.is_stateful:
            continue
        states, rank = [], 0
        while (path := folder / numbered(STATE_FILE.format(rank=rank), index)).is_file():
            states.append(load_safely(path))
            rank += 1
        if states:
            hook.load_state_dict(states, accelerator.process_index)
