"""The final folder under model parallelism: stages and tensor-parallel shares, gathered one tensor at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.modeling.gathering import process_index, wait_for_everyone
from accel_scale.parallel.model_parallel import ModelParallel
from accel_scale.training.checkpoints.staging import save_atomically
from accel_scale.training.saving.final_model import correct_config, make_generation_config_savable
from accel_scale.training.saving.tensor_difference import difference
from accel_scale.training.saving.verification import SavedTensors, VerifyResult, mismatch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedTokenizerBase


def save_final_shared(
    shared: ModelParallel, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path
) -> VerifyResult:
    """Write a folder that plain `from_pretrained` loads, and read it back; call it on every process.

    Rank 0 holds the whole model in host memory while it writes.

    Raises:
        CheckpointMismatch: if the files differ from the gathered weights; `output_dir` is then left as it was.
    """
    weights = dict(_gathered(shared))
    base = shared.parts[0]
    make_generation_config_savable(base)
    with save_atomically(output_dir) as staging:
        result = VerifyResult(0, 0.0, 0.0, "")
        if process_index() == 0:
            base.save_pretrained(staging, state_dict=dict(weights))
            correct_config(staging)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            result = _verified(weights, staging)
        wait_for_everyone()
    return result


def _gathered(shared: ModelParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the plain model, whole, on rank 0; nothing elsewhere. Stages send their tensors one by one."""
    import torch.distributed as dist

    pp = shared.mesh["pp"]
    group, stage = pp.get_group(), pp.get_local_rank()
    is_first_of_stage = shared.layout.coordinate(dist.get_rank()) | {"pp": 0} == shared.layout.coordinate(0)
    for sender in range(shared.layout.pp):
        if sender == stage:
            for name, whole in _whole(shared):
                if process_index() == 0:
                    yield name, whole
                elif is_first_of_stage:
                    _send(name, whole, group)
            if is_first_of_stage and sender:
                _send(None, None, group)
        elif process_index() == 0:
            yield from _receive(group, sender)
    dist.barrier(group=group)


def _whole(shared: ModelParallel) -> Iterator[tuple[str, torch.Tensor]]:
    from torch.distributed.tensor import DTensor

    from accel_scale.parallel.tensor import plain_shapes

    shapes: dict[str, tuple[int, ...]] = {}
    for part in shared.parts:
        shapes |= plain_shapes(part)
    for name, tensor, is_copy in shared.tensors():
        if is_copy:
            continue
        whole: Any = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        yield name, whole.reshape(shapes.get(name, whole.shape)).cpu().contiguous()


def _send(name: str | None, whole: torch.Tensor | None, group: ProcessGroup | None) -> None:
    import torch.distributed as dist

    facts = None if whole is None else (name, tuple(whole.shape), whole.dtype)
    dist.send_object_list([facts], group=group, group_dst=0)
    if whole is not None:
        dist.send(whole.to(_device_of(group)), group=group, group_dst=0)


def _receive(group: ProcessGroup | None, sender: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch
    import torch.distributed as dist

    while True:
        facts: list[Any] = [None]
        dist.recv_object_list(facts, group=group, group_src=sender)
        if facts[0] is None:
            return
        name, shape, dtype = facts[0]
        whole = torch.empty(shape, dtype=dtype, device=_device_of(group))
        dist.recv(whole, group=group, group_src=sender)
        yield name, whole.cpu()


def _device_of(group: ProcessGroup | None) -> str:
    """Device type whose tensors the group's backend sends."""
    import torch.distributed as dist

    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _verified(weights: dict[str, torch.Tensor], folder: Path) -> VerifyResult:
    started = time.perf_counter()
    saved = SavedTensors(folder, None)
    problems, largest, count = list(saved.problems), 0.0, 0
    for name in saved.file_of:
        stored = saved.read(name)
        if name not in weights or stored is None:
            problems.append(f"{name} is unexpected or cannot be read")
            continue
        problem, diff = difference(name, weights[name], stored)
        problems += [problem] if problem else []
        largest, count = max(largest, diff), count + 1
    problems += [f"{name} is missing" for name in sorted(set(weights) - set(saved.file_of))]
    if problems:
        raise mismatch(folder, problems)
    return VerifyResult(count, largest, time.perf_counter() - started, "model.safetensors")
