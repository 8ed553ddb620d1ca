"""Compare a distributed checkpoint (FSDP's sharded format) with the weights in memory, shard by shard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import first_line
from accel_scale.modeling.gathering import CHUNK_BYTES, whole_shape
from accel_scale.training.saving.tensor_difference import difference, tied_names

if TYPE_CHECKING:
    import torch


def compare_sharded(expected: dict[str, torch.Tensor], folder: Path) -> tuple[int, float, list[str]]:
    """Compare this rank's shards of a distributed checkpoint with its own weights, on every rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

    stored: dict[str, Any] = {
        key.removeprefix("model."): value
        for key, value in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    }
    tied = tied_names(expected)
    problems = [
        f"{name} is missing"
        for name in expected
        if name not in stored and not any(other in stored for other in tied.get(name, ()))
    ]
    problems += [f"{name} is unexpected" for name in sorted(set(stored) - set(expected))]
    present = {name: tensor.detach() for name, tensor in expected.items() if name in stored}
    max_diff, count = 0.0, 0
    for chunk in _local_chunks(present):
        shapes = {n: tuple(stored[n].size) for n in chunk}
        problems += [
            f"{n} has shape {list(shapes[n])} instead of {list(whole_shape(t))}"
            for n, t in chunk.items()
            if shapes[n] != whole_shape(t)
        ]
        read = {n: torch.empty_like(t) for n, t in chunk.items() if shapes[n] == whole_shape(t)}
        try:
            load({"model": read}, checkpoint_id=str(folder))
        except CheckpointException as error:  # on every rank, naming the error of each rank
            problems.append(f"{folder.name} cannot be read ({_root_cause(error)})")
            continue
        for name, tensor in read.items():
            if not _local(tensor).numel():  # fewer rows than ranks
                continue
            problem, diff = difference(name, _local(chunk[name]), _local(tensor))
            max_diff = max(max_diff, diff)
            problems += [problem] if problem else []
        count += len(read)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problems, max_diff))
    merged = list(dict.fromkeys(problem for found, _ in everyone for problem in found))
    return count, max(diff for _, diff in everyone), merged


def _root_cause(error: Any) -> str:
    return first_line(next((failure for failure, _ in error.failures.values()), error))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _share_bytes(tensor: Any) -> int:
    """Bytes of an even shard: equal on all ranks, so that all close and load a chunk at the same tensor."""
    whole: int = tensor.numel() * tensor.element_size()
    if not hasattr(tensor, "placements"):
        return whole
    sizes = (
        size
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        if placement.is_shard()
    )
    return whole // math.prod(sizes)


def _local_chunks(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    chunk: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        chunk[name] = tensor
        size += _share_bytes(tensor)
        if size > CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk
