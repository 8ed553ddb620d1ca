"""Cross-entropy over a vocabulary divided among tensor-parallel ranks, without whole logits on any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose logits this rank computes.

    Attributes:
        group: The ranks that share the vocabulary, in its order.
        first: This rank's first token.
        size: Number of its tokens.
    """

    group: ProcessGroup | None
    first: int
    size: int

    def locate(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(local column, True if it is local) of token ids; the column of a token held elsewhere is 0."""
        column = target - self.first
        is_here = (column >= 0) & (column < self.size)
        return column.masked_fill(~is_here, 0), is_here

    def log_softmax(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 log-probabilities of this rank's tokens, (tokens, size), and of the targets, (tokens, 1) on all ranks.

        The ranks exchange two numbers per token: log Σ exp of their logits, and the target's logit where it is held.

        Args:
            logits: (tokens, size)
            target: Token ids of the whole vocabulary. (tokens, 1)
        """
        values = logits.float()
        column, is_here = self.locate(target)
        picked = values.gather(1, column).masked_fill(~is_here, 0.0)
        gathered = self._gather(torch.cat([torch.logsumexp(values, 1, keepdim=True), picked], 1))
        total = torch.logsumexp(gathered[:, :, :1], 0)
        # A copy may be overwritten, but not the caller's logits.
        log_probs = values - total if values is logits else values.sub_(total)
        return log_probs, gathered[:, :, 1:].sum(0) - total

    def count_correct(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Number of targets with the largest logit of the whole vocabulary, an integer scalar."""
        largest, at = logits.float().max(1, keepdim=True)
        column, is_here = self.locate(target)
        gathered = self._gather(torch.cat([largest, ((column == at) & is_here).float()], 1))
        winner = gathered[:, :, 0].argmax(0, keepdim=True)
        return gathered[:, :, 1].gather(0, winner).sum().long()

    def add_to_targets(self, grad: torch.Tensor, target: torch.Tensor, value: float) -> None:
        """Add `value` to `grad`, (tokens, size), at the targets held by this rank."""
        column, is_here = self.locate(target)
        grad.scatter_add_(1, column, is_here.to(grad.dtype).mul_(value))

    def sum(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """Sum the hidden states' gradient, of which each rank has computed the part from its logits."""
        grad_hidden = grad_hidden.contiguous()
        dist.all_reduce(grad_hidden, group=self.group)
        return grad_hidden

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks' `values`, stacked."""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values, group=self.group)
        return torch.stack(parts)


def held_head(weight: Any, bias: Any = None) -> tuple[Any, Any, VocabularyShard | None]:
    """(weight, bias, shard) to compute logits with: whole, or this rank's rows under tensor parallelism.

    FSDP2 presents the parameters of a wrapped module whole inside its forward. If the head is wrapped separately, it
    is gathered here, and its gradient, computed from this rank's tokens, is averaged over the data-parallel ranks as
    FSDP2 does for all others: by default, `full_tensor` would assume it to be the same on all of them.
    """
    if not hasattr(weight, "full_tensor"):
        return weight, bias, None
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    tp = names.index("tp") if "tp" in names else None
    if tp is None or not weight.placements[tp].is_shard(0):
        return _whole(weight), _whole(bias), None
    group = mesh.get_group(tp)
    size = dist.get_world_size(group)
    chunk = -(-weight.shape[0] // size)  # as `torch.chunk` divides
    first = min(weight.shape[0], chunk * dist.get_rank(group))
    shard = VocabularyShard(group, first, min(weight.shape[0], first + chunk) - first)
    return _rows(weight, shard, tp), _rows(bias, shard, tp), shard


def _rows(parameter: Any, shard: VocabularyShard, tp: int) -> Any:
    if parameter is None or parameter.device_mesh.ndim == 1:
        return None if parameter is None else parameter.to_local()
    from torch.distributed.tensor import Partial

    # Through the whole tensor: torch (2.13) cannot undo, differentiably, one of two shardings of the same dimension.
    placements = [Partial("sum") if dim == tp else Partial("avg") for dim in range(parameter.device_mesh.ndim)]
    return parameter.full_tensor(grad_placements=placements)[shard.first : shard.first + shard.size]


def _whole(parameter: Any) -> Any:
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial, Replicate

    names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
    return parameter.full_tensor(grad_placements=[Replicate() if n == "tp" else Partial("avg") for n in names])
