"""Norm and clipping of gradients that are sharded over different meshes, in different ways, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# As in `torch.nn.utils.clip_grad_norm_`, so that clipping gives the same weights.
_EPSILON = 1e-6


def global_grad_norm(parameters: Iterable[torch.Tensor], pp_group: ProcessGroup | None = None) -> torch.Tensor:
    """Euclidean norm of the model's gradients, an fp32 scalar on their device; bitwise equal on all ranks.

    Gradients may be plain tensors (assumed equal on all ranks of the meshes below, and not summed over them) and
    DTensors on any meshes, with any mixture of `Shard`, `Replicate` and `Partial`: FSDP2, tensor parallelism, both.
    `torch.nn.utils.clip_grad_norm_` stacks the tensors' norms and fails if their meshes differ.

    One scalar is all-reduced per mesh dimension. A tensor replicated by a dimension counts on each of its ranks with
    weight 1 / size: with nondeterministic kernels, copies of a gradient differ in their last bits, and a norm that
    differed with them would clip the copies of a weight differently and let them drift apart.

    Args:
        parameters: The same on all ranks of a pipeline stage, in the same order; only those with a gradient count.
        pp_group: Group of pipeline stages, whose ranks hold different parameters.
    """
    import torch

    with torch.no_grad():
        held = list({id(p): p for p in parameters}.values())
        norm = _sum_of_squares(held, pp_group).sqrt()
    return norm.to(torch.float32)


def clip_gradients(
    parameters: Iterable[torch.Tensor], max_norm: float, pp_group: ProcessGroup | None = None
) -> torch.Tensor:
    """Scale all gradients in place so that `global_grad_norm` is at most `max_norm`; returns the norm before.

    A norm that is not finite makes all gradients not finite, as in torch. ``max_norm=math.inf`` leaves them alone.
    """
    import torch

    held = list({id(p): p for p in parameters}.values())
    norm = global_grad_norm(held, pp_group)
    if math.isinf(max_norm):
        return norm
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    with torch.no_grad():
        # A sum of parts, `Partial`, is scaled by scaling its parts.
        for tensors in _by_device_and_dtype([_local(p.grad) for p in held if p.grad is not None]):
            torch._foreach_mul_(tensors, factor.to(tensors[0].device))
    return norm


def _sum_of_squares(parameters: list[torch.Tensor], pp_group: ProcessGroup | None) -> torch.Tensor:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    groups: dict[tuple[int, ...], ProcessGroup] = {}  # by their ranks: one dimension is part of several meshes
    buckets: dict[frozenset[tuple[int, ...]], list[torch.Tensor]] = {}  # by the groups that a tensor is sharded over
    communication_device = None
    for parameter in parameters:
        # From all parameters, including those without a gradient on this rank: all must take part in all reductions.
        if isinstance(parameter, DTensor):
            communication_device = parameter.device_mesh.device_type
            for ranks, group in _groups(parameter):
                groups.setdefault(ranks, group)
        if parameter.grad is None:
            continue
        grad = _summed(parameter.grad)
        sharded: frozenset[tuple[int, ...]] = frozenset()
        if isinstance(grad, DTensor):
            pairs = zip(_groups(grad), grad.placements, strict=True)
            sharded = frozenset(ranks for (ranks, _), placement in pairs if not placement.is_replicate())
        buckets.setdefault(sharded, []).append(_local(grad))
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for sharded, tensors in buckets.items():
        copies = math.prod(len(ranks) for ranks in groups if ranks not in sharded)
        total += _local_sum_of_squares(tensors).to(device) / copies
    if communication_device is not None:
        total = total.to(communication_device)  # gradients offloaded to the host
    for ranks, group in groups.items():
        if len(ranks) > 1:
            dist.all_reduce(total, group=group)
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.to(device)


def _groups(tensor: Any) -> list[tuple[tuple[int, ...], ProcessGroup]]:
    """(ranks, group) of each dimension of a DTensor's mesh."""
    import torch.distributed as dist

    mesh = tensor.device_mesh
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return [(tuple(dist.get_process_group_ranks(group)), group) for group in groups]


def _summed(grad: Any) -> Any:
    """`grad` without pending sums: the norm of a sum is not the sum of the norms."""
    placements = getattr(grad, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return grad
    from torch.distributed.tensor import Replicate

    return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in placements])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory; a plain tensor is returned itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _local_sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    import torch

    device = tensors[0].device
    norms: list[torch.Tensor] = []
    for same in _by_device_and_dtype(tensors):
        norms += [norm.to(device) for norm in torch._foreach_norm(same, 2, dtype=torch.float32)]
    return torch.stack(norms).double().square().sum()


def _by_device_and_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists for torch's foreach operators; without empty tensors, which have no norm to add."""
    lists: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())
