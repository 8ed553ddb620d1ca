"""Whether documents and rows of a micro-batch stay isolated, and whether a token sees later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from accel_scale.start_check.rows import TinyBatch
from accel_scale.start_check.steps import same_draws

if TYPE_CHECKING:
    from torch import nn

# Of the logits' size. What leaks through one layer of attention, a state or a convolution moves them by a percent of
# their size and more; rounding by less than 1e-5.
_TOLERANCE = 1e-4

Leak = Literal["none", "ahead", "others"]


def find_leak(model: nn.Module, batch: TinyBatch, logits: torch.Tensor) -> Leak:
    """What a changed half of one document changes where it must not.

    Args:
        logits: What `model` gives for `batch.inputs` in training mode.

    Returns:
        ``ahead`` where the tokens before it in the same document notice, so the model is not causal; ``others`` where
        other documents or rows do; else ``none``.
    """
    inputs = {name: value for name, value in batch.changed.items() if name != "labels"}
    same_draws()
    with torch.no_grad():
        changed = model(**inputs, use_cache=False).logits
    moved = (changed.float() - logits.float()).abs().amax(-1)
    limit = _TOLERANCE * max(1.0, logits.float().abs().amax().item())
    noticed = ~(moved <= limit)  # NaN is noticed
    if (noticed & batch.before).any():
        return "ahead"
    return "others" if (noticed & batch.others).any() else "none"
