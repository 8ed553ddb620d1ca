"""Rotary embeddings whose frequencies depend on the longest position: that of whole rows, not of a rank's share.

Dynamic NTK scaling and LongRoPE (Phi-3) depend on the position ids that they receive. On parts of rows, ranks would
choose different frequencies, and keys would not match queries. Checked on transformers 5.23 (`dynamic_rope_update`).
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

_WRAPPED = "_sees_whole_rows"


def use_longest_position(model: nn.Module) -> None:
    """Make such embeddings of `model` see the longest position of the whole rows if rows are cut; in place.

    Raises:
        ConfigError: for embeddings inside layers, which are recomputed when the whole rows are no longer known.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if not _depends_on_length(module) or _WRAPPED in vars(module):
            continue
        if id(module) in inside:
            raise ConfigError(
                f"{type(module).__name__} scales its frequencies by the length of a row, in each layer by itself.",
                place="--sp_size",
                fix="use 1 for this model.",
            )
        _wrap(module)


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _wrap(module: Any) -> None:
    import torch

    from accel_scale.parallel.sequence_attention import current_positions

    previous = module.forward.__func__

    @functools.wraps(type(module).forward)
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = current_positions()
        if whole is None:
            return previous(self, x, position_ids, *args, **kwargs)
        longest = whole.max().expand(position_ids.shape[0], 1)
        cos, sin = previous(self, x, torch.cat([position_ids, longest], 1), *args, **kwargs)
        return cos[:, :-1], sin[:, :-1]

    module.forward = types.MethodType(forward, module)
    setattr(module, _WRAPPED, True)
