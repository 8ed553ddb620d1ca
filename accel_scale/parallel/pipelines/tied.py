"""Tied embeddings across a pipeline: the first stage's embedding and the last stage's copy stay one weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_scale.parallel.pipelines.split import stage_of


class TiedWeights:
    """This rank's copy of a tied weight, if it has one, and the exchange with the rank that holds the other copy.

    Both ranks add the same two gradients in the same order, so an optimizer that treats both weights alike (the same
    parameter group, the same clipping) takes bitwise the same step on both.

    Args:
        parts: This rank's parts, from `split_model`.
        group: The pipeline's ranks. With FSDP2 or tensor parallelism, ranks of a group hold the same shard.
    """

    def __init__(self, parts: Sequence[Any], group: dist.ProcessGroup) -> None:
        self._group = group
        self._part = next((part for part in parts if stage_of(part).tied_weight is not None), None)
        if self._part is not None:
            stage = stage_of(self._part)
            self._is_first = stage.is_first
            self._peer = (stage.num_stages - 1) % dist.get_world_size(group) if stage.is_first else 0

    @property
    def _weight(self) -> Any:
        # Looked up at each call, because FSDP2 replaces parameters.
        assert self._part is not None
        return self._part.get_parameter(stage_of(self._part).tied_weight)

    def set_aside(self) -> Any:
        """Detach the gradient of earlier calls, which is already summed; pass it to `sum_gradients`."""
        if self._part is None:
            return None
        earlier, self._weight.grad = self._weight.grad, None
        return earlier

    @torch.no_grad()
    def sum_gradients(self, earlier: object = None) -> None:
        """Replace both gradients by their sum, plus the result of `set_aside`."""
        if self._part is None or not self._weight.requires_grad:
            return
        weight = self._weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        own = _local(weight.grad)
        other = self._exchange(own)
        own.copy_(own + other if self._is_first else other + own)
        if earlier is not None:
            weight.grad += earlier

    def _exchange(self, own: torch.Tensor) -> torch.Tensor:
        other, mine = torch.empty_like(own, memory_format=torch.contiguous_format), own.contiguous()
        operations = [
            dist.P2POp(dist.isend, mine, group=self._group, group_peer=self._peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=self._peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return other


def _local(tensor: torch.Tensor) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
