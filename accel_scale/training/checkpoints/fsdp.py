"""Weights and optimizers of FSDP2: gathered on rank 0, or each rank's shards by torch.distributed.checkpoint.

Names and contents are those of Accelerate 1.15 (`save_fsdp_model`, `save_fsdp_optimizer`), whose functions load them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.errors import ConfigError, first_line
from accel_scale.training.checkpoints.contents import Write, host_copy, numbered, what_differs, write_tensors
from accel_scale.training.checkpoints.manifest import Manifest
from accel_scale.training.checkpoints.pickles import refuse_unsafe_folder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


class FsdpContents:
    """FSDP version 2; `layout` is the launch file's ``fsdp_state_dict_type``."""

    def __init__(self, accelerator: Any) -> None:
        if not accelerator.is_fsdp2:
            raise ConfigError(
                "FSDP 1 is deprecated and not supported.", place="fsdp_version", fix="set fsdp_version: 2."
            )
        self._accelerator = accelerator
        self.layout = accelerator.state.fsdp_plugin.state_dict_type.name
        if self.layout not in (FULL, SHARDED):
            raise ConfigError(
                f"FSDP2 has no {self.layout}.", place="fsdp_state_dict_type", fix=f"write {SHARDED} or {FULL}."
            )

    def refuse_asynchronous(self) -> str | None:
        return None

    def capture(self, *, copy: bool, group: ProcessGroup | None) -> Write:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        accelerator, full = self._accelerator, self.layout == FULL
        options = StateDictOptions(full_state_dict=full, cpu_offload=full and accelerator.num_processes > 1)
        pairs = list(zip(accelerator._models, accelerator._optimizers, strict=False))
        models = [get_model_state_dict(model, options=options) for model in accelerator._models]
        optimizers = [_optimizer_state(model, optimizer, options) for model, optimizer in pairs]
        if full:
            return _writer_of_whole(models, optimizers, is_main=accelerator.is_main_process, copy=copy)
        return _writer_of_shards(models, optimizers, copy=copy, group=group)

    def load(self, folder: Path, manifest: Manifest, scratch: Path) -> None:
        from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

        accelerator = self._accelerator
        refuse_unsafe_folder(folder)
        plugin = accelerator.state.fsdp_plugin
        try:
            with layout_of_checkpoint(plugin, manifest.layout), one_reason():
                for index, model in enumerate(accelerator._models):
                    load_fsdp_model(plugin, accelerator, model, str(folder), index)
                for index, optimizer in enumerate(accelerator._optimizers):
                    load_fsdp_optimizer(plugin, accelerator, optimizer, accelerator._models[index], str(folder), index)
        except (RuntimeError, KeyError) as error:
            raise ConfigError(
                f"{folder.name} does not fit this model and optimizer ({what_differs(error)}).",
                place="resume",
                fix="resume with those it was written by.",
            ) from error


@contextlib.contextmanager
def layout_of_checkpoint(plugin: Any, layout: str) -> Iterator[None]:
    """Let Accelerate read a checkpoint written in `layout`, regardless of the layout this run writes."""
    from torch.distributed.fsdp import StateDictType

    names = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
    configured = {name: getattr(plugin, name) for name in names}
    if plugin.state_dict_type.name != layout:
        plugin.state_dict_config = plugin.optim_state_dict_config = None  # otherwise they are not updated
        plugin.set_state_dict_type(StateDictType[layout])
    try:
        yield
    finally:
        for name, value in configured.items():
            setattr(plugin, name, value)


@contextlib.contextmanager
def one_reason() -> Iterator[None]:
    """Raise a one-line error for torch.distributed.checkpoint's, which is no `Exception` and prints all tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise RuntimeError(f"{first_line(reason)}, on rank {rank}") from None


def _optimizer_state(model: Any, optimizer: Any, options: Any) -> Any:
    """Undo the zero step by which torch (2.13) creates, and keeps, the state of an optimizer that has not stepped."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    inner = optimizer.optimizer  # without Accelerate's loss scaling, which has no scale before the first step
    has_stepped = bool(inner.state)
    state: Any = get_optimizer_state_dict(model, inner, options=options)
    if not has_stepped:
        inner.state.clear()
        for entries in state.get("state", {}).values():
            if "step" in entries:
                entries["step"] = entries["step"] * 0
    return state


def _writer_of_whole(models: list[Any], optimizers: list[Any], *, is_main: bool, copy: bool) -> Write:
    if not is_main:
        return lambda folder: None
    # Gathered tensors are new already, unless a single process holds everything.
    models, optimizers = host_copy(models, copy=copy), host_copy(optimizers, copy=copy)

    def write(folder: Path) -> None:
        for index, state in enumerate(models):
            write_tensors(state, folder / numbered("pytorch_model_fsdp.bin", index))
        for index, state in enumerate(optimizers):
            write_tensors(state, folder / numbered("optimizer.bin", index))

    return write


def _writer_of_shards(models: list[Any], optimizers: list[Any], *, copy: bool, group: ProcessGroup | None) -> Write:
    import torch.distributed.checkpoint as dist_cp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    states = {f"pytorch_model_fsdp_{index}": {"model": state} for index, state in enumerate(models)}
    states |= {f"optimizer_{index}": {"optimizer": state} for index, state in enumerate(optimizers)}
    if copy:
        states = {name: BlockingAsyncStager().stage(state) for name, state in states.items()}

    def write(folder: Path) -> None:
        for name, state in states.items():
            with torch.no_grad(), one_reason():
                dist_cp.save(state, storage_writer=dist_cp.FileSystemWriter(folder / name), process_group=group)

    return write
