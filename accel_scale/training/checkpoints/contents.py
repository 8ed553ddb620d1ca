"""Contents common to checkpoints of every strategy, and the weights and optimizer of runs that replicate them.

Files have Accelerate's names. A capture is taken between two steps; it may be written later, in a thread.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel_scale.errors import ConfigError, first_line
from accel_scale.training.checkpoints.manifest import Manifest
from accel_scale.training.checkpoints.pickles import load_safely, refuse_unsafe
from accel_scale.training.checkpoints.random_states import derive_random_states, put_random_states, take_random_states

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed import ProcessGroup

STATE = "state.json"
Write = Callable[[Path], None]


class Contents(Protocol):
    """Writes and loads weights and optimizers under one strategy."""

    layout: str

    def refuse_asynchronous(self) -> str | None:
        """The reason why it cannot write while training continues; None if it can."""

    def capture(self, *, copy: bool, group: ProcessGroup | None) -> Write:
        """Capture weights and optimizers; collective. The returned function writes this rank's files, on every rank.

        Args:
            copy: True if training continues before the capture is written.
            group: Process group for the collectives of the write; None for the default group.
        """

    def load(self, folder: Path, manifest: Manifest, scratch: Path) -> None:
        """Load weights and optimizers; collective. `scratch` may hold temporary files and is removed afterwards."""


def numbered(name: str, index: int) -> str:
    """Accelerate's file name for the `index`-th model, optimizer or schedule."""
    stem, _, suffix = name.rpartition(".")
    return name if index == 0 else f"{stem}_{index}.{suffix}"


def host_copy(value: object, *, copy: bool, seen: dict[int, Any] | None = None) -> Any:
    """Return `value` with every tensor in host memory; containers are new, host tensors are copied only if `copy`.

    A tensor that occurs twice remains one tensor. A view of a larger tensor becomes a tensor of its own, so that the
    written bytes do not depend on `copy`.
    """
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen[id(value)] = _tensor_in_host_memory(value.detach(), copy=copy)
        return seen[id(value)]
    if isinstance(value, dict):
        items = {key: host_copy(item, copy=copy, seen=seen) for key, item in value.items()}
        return type(value)(items) if type(value) is not dict else items
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(host_copy(item, copy=copy, seen=seen) for item in value)
    return value


def _tensor_in_host_memory(tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.cpu().contiguous()
    if type(tensor) is not torch.Tensor:
        return tensor.clone() if copy else tensor
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if copy or not is_whole else tensor


def write_tensors(state: object, path: Path) -> None:
    """Write with `torch.save`, and make sure that the file can be read without trusting it.

    Raises:
        ConfigError: if it holds objects that only an unrestricted unpickler can read.
    """
    torch.save(state, path)
    refuse_unsafe(path)


# ── Beside weights and optimizers ────────────────────────────────────────────────────────────────────────────────────


def capture_common(accelerator: Accelerator, state: dict[str, Any], registered: dict[str, Any]) -> Write:
    """Capture schedules, scaler, `state` and registered states on rank 0, and random states on every rank.

    Raises:
        ConfigError: if a state cannot be stored as JSON or a schedule holds objects.
    """
    content: dict[str, Any] = {
        "state": state,
        "registered": {name: obj.state_dict() for name, obj in registered.items()},
        "accelerator_step": accelerator.step,
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
    }
    _require_json(content["state"], "state")
    for name, value in content["registered"].items():
        _require_json(value, f"registered object {name!r}")
    files = {f"random_states_{accelerator.process_index}.pt": _as_bytes(take_random_states(accelerator.device))}
    if accelerator.is_main_process:
        files[STATE] = (json.dumps(content, indent=1) + "\n").encode()
        for index, scheduler in enumerate(schedules(accelerator)):
            files[numbered("scheduler.bin", index)] = _as_bytes(host_copy(scheduler.state_dict(), copy=False))

    def write(folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)

    return write


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of ``state.json``, as written by `capture_common`."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def load_common(accelerator: Accelerator, folder: Path, content: dict[str, Any], registered: dict[str, Any]) -> None:
    """Load schedules, registered states and Accelerate's step counter; `load_scaler` loads the scaler."""
    for index, scheduler in enumerate(schedules(accelerator)):
        scheduler.load_state_dict(load_safely(folder / numbered("scheduler.bin", index)))
    for name, obj in registered.items():
        obj.load_state_dict(content["registered"][name])
    accelerator.step = content["accelerator_step"]


def load_scaler(accelerator: Accelerator, content: dict[str, Any]) -> None:
    """Load fp16's loss scale; call it before loading the optimizer's state, which FSDP2 creates by a step of zeros."""
    if accelerator.scaler is None or content["scaler"] is None:
        return
    accelerator.scaler.load_state_dict(content["scaler"])
    if accelerator.is_fsdp2:
        # Private, as in Accelerate 1.15's load_state: that step unscales before anything has been scaled.
        accelerator.scaler._lazy_init_scale_growth_tracker(accelerator.scaler._device)


def load_random_states(accelerator: Accelerator, folder: Path, manifest: Manifest) -> None:
    """Load random states; call it last. Ranks the checkpoint lacks are seeded from its seed, step and their rank."""
    rank = accelerator.process_index
    if rank < manifest.world_size:
        put_random_states(load_safely(folder / f"random_states_{rank}.pt"), accelerator.device)
    else:
        derive_random_states(manifest.seed, manifest.step, rank)


def schedules(accelerator: Accelerator) -> list[Any]:
    """The prepared schedules that are not part of DeepSpeed's engine."""
    return [s for s in accelerator._schedulers if type(s).__name__ != "DeepSpeedSchedulerWrapper"]


def _as_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    refuse_unsafe(buffer)
    return buffer.getvalue()


def _require_json(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{where} has the key {key!r}, which JSON would turn into text.",
                    place="CheckpointManager.save",
                    fix="use text as keys.",
                )
            _require_json(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, (str, int, float, bool))):
        raise ConfigError(
            f"{where} is a {type(value).__name__}, which JSON does not hold.",
            place="CheckpointManager.save",
            fix="keep numbers, text, lists and dictionaries in it.",
        )


# ── Replicated weights: one process, and DDP ─────────────────────────────────────────────────────────────────────────


class ReplicatedContents:
    """Rank 0 writes everything; every rank reads everything."""

    layout = "whole"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def refuse_asynchronous(self) -> str | None:
        return None

    def capture(self, *, copy: bool, group: ProcessGroup | None) -> Write:
        accelerator = self._accelerator
        if not accelerator.is_main_process:
            return lambda folder: None
        models = [_whole_weights(accelerator, model, copy=copy) for model in accelerator._models]
        optimizers = [host_copy(o.state_dict(), copy=copy) for o in accelerator._optimizers]

        def write(folder: Path) -> None:
            from safetensors.torch import save_file

            for index, weights in enumerate(models):
                save_file(weights, folder / numbered("model.safetensors", index), metadata={"format": "pt"})
            for index, state in enumerate(optimizers):
                write_tensors(state, folder / numbered("optimizer.bin", index))

        return write

    def load(self, folder: Path, manifest: Manifest, scratch: Path) -> None:
        from safetensors.torch import load_file

        for index, model in enumerate(self._accelerator._models):
            base = self._accelerator.unwrap_model(model, keep_torch_compile=False)
            weights = load_file(folder / numbered("model.safetensors", index))
            held = base.state_dict()
            first = _first_names(held)
            given = {first[name]: tensor for name, tensor in weights.items() if name in first}
            unknown = {name: tensor for name, tensor in weights.items() if name not in first}
            try:
                base.load_state_dict({n: given[first[n]] for n in held if first[n] in given} | unknown, strict=True)
            except RuntimeError as error:
                raise ConfigError(
                    f"{folder.name} does not fit this model ({what_differs(error)}).",
                    place="resume",
                    fix="resume with the model it was written by.",
                ) from error
        for index, optimizer in enumerate(self._accelerator._optimizers):
            state = load_safely(folder / numbered("optimizer.bin", index))
            try:
                optimizer.load_state_dict(state)
            except (ValueError, KeyError) as error:
                raise ConfigError(
                    f"{folder.name} does not fit this optimizer ({first_line(error)}).",
                    place="resume",
                    fix="resume with the optimizer it was written by.",
                ) from error


def what_differs(error: BaseException) -> str:
    """The first difference on one line; torch lists the differences below a headline."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1][:200].rstrip(". ") if len(lines) > 1 else first_line(error)[:200]


def _whole_weights(accelerator: Accelerator, model: nn.Module, *, copy: bool) -> dict[str, torch.Tensor]:
    state = accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()
    objects = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if objects:
        raise ConfigError(
            f"the model's state holds {objects[0]}, which is not a tensor.",
            place="CheckpointManager.save",
            fix="keep such state in a registered object.",
        )
    first = _first_names(state)
    return {name: host_copy(tensor, copy=copy) for name, tensor in state.items() if first[name] == name}


def _first_names(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Map each name to the first name of the same tensor, so that tied weights are written once."""
    seen: dict[Any, str] = {}
    return {
        name: seen.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype) if t.numel() else name, name)
        for name, t in state.items()
    }
