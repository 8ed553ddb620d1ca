"""A forward pass through all stages of a pipeline, without a schedule: ranks run ahead of each other freely."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def forward_through(pipeline: Any, inputs: dict[str, torch.Tensor], sends: list[Any]) -> torch.Tensor | None:
    """Return the last stage's output on its rank, None elsewhere.

    Args:
        pipeline: A `Pipeline` whose parts are in the mode to run in.
        inputs: ``input_ids`` (batch, length) and the parts' other inputs, on all ranks.
        sends: Pending messages and their tensors are appended to it.
    """
    group, others = pipeline.group, dict(inputs)
    ids = others.pop("input_ids")
    labels = {name: others.pop(name) for name in ("labels", "shift_labels") if name in others}
    parts = dict(zip(pipeline.stage_indices, pipeline.parts, strict=True))
    size = dist.get_world_size(group)
    hidden: torch.Tensor | None = None
    for index in range(pipeline.num_stages):
        if index not in parts:
            continue
        if index == 0:
            hidden = ids
        elif index - 1 not in parts:
            hidden = _receive(ids, parts[index].config.get_text_config().hidden_size, (index - 1) % size, group)
        assert hidden is not None
        is_last = index == pipeline.num_stages - 1
        hidden = parts[index](hidden, **others, **(labels if is_last else {}))
        if is_last:
            return hidden
        if index + 1 not in parts:
            _send(hidden, (index + 1) % size, group, sends)
    return None


def _send(hidden: torch.Tensor, to: int, group: dist.ProcessGroup, sends: list[Any]) -> None:
    """Send hidden states after their dtype, which the receiver cannot know (autocast, mixed precision)."""
    header = torch.tensor([_DTYPES.index(hidden.dtype)], device=hidden.device)
    for tensor in (header, hidden.contiguous()):
        sends.append((dist.isend(tensor, group=group, group_dst=to), tensor))


def _receive(ids: torch.Tensor, hidden_size: int, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    header = torch.zeros(1, dtype=torch.long, device=ids.device)
    dist.recv(header, group=group, group_src=source)
    hidden = torch.empty((*ids.shape, hidden_size), dtype=_DTYPES[int(header)], device=ids.device)
    dist.recv(hidden, group=group, group_src=source)
    return hidden
