"""Replicas and shards of one group of ranks' part of a model: FSDP2's `fully_shard`, torch's `replicate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.modeling.fsdp2_preparation import heed_forward_prefetch
from accel_scale.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def apply_data_parallel(
    part: nn.Module,
    mesh: DeviceMesh,
    layout: ParallelLayout,
    *,
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shard or replicate `part` in place over the ranks of `mesh` that average its gradients.

    Call after tensor parallelism and after the split into stages. Blocks (the model's ``_no_split_modules``) are
    separate units, so that their communication overlaps with computation. Gradients become means over
    `layout.gradient_ranks`; nothing is done if that is one rank.

    Args:
        part: A transformers model, or a stage of one that kept its ``_no_split_modules``.
        mesh: From `accel_scale.parallel.layout.build_mesh`.
        layout: The layout of the mesh.
        reshard_after_forward: Free a block's gathered weights between forward and backward.
        compute_dtype: Dtype of gathered weights, with gradients reduced in fp32. None: the weights' own.
    """
    if layout.gradient_ranks == 1:
        return
    wrap = _shard if layout.shards_weights else _replicate
    options = _policy(compute_dtype)
    for block in [*blocks_of(part), part]:
        wrap(block, mesh, layout, options, reshard_after_forward)
    if layout.shards_weights:
        heed_forward_prefetch(part)


def blocks_of(part: Any) -> list[nn.Module]:
    """The transformer blocks, by the class names given by the model."""
    names = set(getattr(part, "_no_split_modules", None) or ())
    return [module for module in part.modules() if type(module).__name__ in names]


def _policy(compute_dtype: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if compute_dtype is None:
        return {}
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)}


def _shard(block: Any, mesh: Any, layout: ParallelLayout, options: dict[str, Any], reshard: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    # Ranks that share a sequence also share shards: their gradients of a weight are parts of one mean.
    dimensions = mesh["dp_replicate", "shard"] if layout.dp_replicate > 1 else mesh["shard"]
    fully_shard(block, mesh=dimensions, reshard_after_forward=reshard, **options)


def _replicate(block: Any, mesh: Any, layout: ParallelLayout, options: dict[str, Any], reshard: bool) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    del layout, reshard  # replicas keep their weights
    replicate(block, mesh=mesh["grad"], **options)
