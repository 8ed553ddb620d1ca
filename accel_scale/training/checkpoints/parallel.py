"""Weights and optimizer of ranks that share the model, by torch.distributed.checkpoint under the plain model's names.

Every tensor is stored once, under its name in the plain model, however it was split. A run with other sizes of tensor,
pipeline, sequence and data parallelism can load the folder, and so can a run whose ranks each hold the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.errors import ConfigError, first_line
from accel_scale.parallel.model_parallel import model_parallel_of
from accel_scale.training.checkpoints.contents import Write
from accel_scale.training.checkpoints.fsdp import one_reason
from accel_scale.training.checkpoints.manifest import Manifest
from accel_scale.training.checkpoints.pickles import refuse_unsafe_folder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

_FOLDER = "model_parallel"
_GROUPS = "optimizer_groups.json"
_RATES = ("lr", "initial_lr")


class ParallelContents:
    """Sharded contents; `layout` is the same for all sizes."""

    layout = "SHARDED_STATE_DICT"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self._shared = accelerator, model_parallel_of(accelerator)

    def refuse_asynchronous(self) -> str | None:
        return None

    def capture(self, *, copy: bool, group: ProcessGroup | None) -> Write:
        import torch.distributed.checkpoint as dist_cp
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        optimizer = self._optimizer()
        tensors = dict(self._named(optimizer, stored=True))
        groups = {
            "has_stepped": bool(optimizer.state),
            "rates": {k: float(optimizer.param_groups[0][k]) for k in _RATES if k in optimizer.param_groups[0]},
        }
        if copy:
            tensors = BlockingAsyncStager().stage(tensors)
        is_main = self._accelerator.is_main_process

        def write(folder: Path) -> None:
            with torch.no_grad(), one_reason():
                writer = dist_cp.FileSystemWriter(folder / _FOLDER)
                dist_cp.save(tensors, storage_writer=writer, process_group=group)
            if is_main:
                (folder / _GROUPS).write_text(json.dumps(groups, indent=1) + "\n", encoding="utf-8")

        return write

    def load(self, folder: Path, manifest: Manifest, scratch: Path) -> None:
        import torch.distributed.checkpoint as dist_cp

        refuse_unsafe_folder(folder)
        groups = json.loads((folder / _GROUPS).read_text(encoding="utf-8"))
        optimizer = self._optimizer()
        if groups["has_stepped"]:
            _make_states(optimizer)
        else:
            optimizer.state.clear()
        tensors = dict(self._named(optimizer, stored=False))
        try:
            with torch.no_grad(), one_reason():
                dist_cp.load(tensors, storage_reader=dist_cp.FileSystemReader(folder / _FOLDER))
        except (RuntimeError, KeyError, ValueError) as error:
            raise ConfigError(
                f"{folder.name} does not fit this model and optimizer ({first_line(error)}).",
                place="resume",
                fix="resume with those it was written by.",
            ) from error
        for group in optimizer.param_groups:
            for name, rate in groups["rates"].items():
                if torch.is_tensor(group.get(name)):
                    group[name].fill_(rate)
                else:
                    group[name] = rate

    def _optimizer(self) -> Any:
        return self._accelerator._optimizers[0].optimizer

    def _named(self, optimizer: Optimizer, *, stored: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Live tensors by name. A copy of another stage's weight is loaded from that weight and not stored."""
        for name, tensor, is_copy in self._shared.tensors() if self._shared is not None else self._whole():
            if is_copy and stored:
                continue
            yield f"model.{name}", tensor.detach()
            for key, value in optimizer.state.get(tensor, {}).items():
                if not torch.is_tensor(value):
                    raise ConfigError(
                        f"the optimizer's state {key!r} is no tensor, so it cannot be stored in shards.",
                        place="--optim",
                        fix="use adamw_torch_fused.",
                    )
                yield f"optimizer.{name}.{key}", value

    def _whole(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Same as `ModelParallel.tensors`, for a model held by this process alone or replicated by DDP."""
        [model] = self._accelerator._models
        seen: set[int] = set()
        base = self._accelerator.unwrap_model(model, keep_torch_compile=False)
        for name, tensor in base.state_dict(keep_vars=True).items():
            if hasattr(tensor, "shape") and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor, False


def _make_states(optimizer: Optimizer) -> None:
    """Create the optimizer's states, which exist only after a step: take one with zero gradients at a rate of 0."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    if not optimizer.state:
        _init_optim_state(optimizer)
