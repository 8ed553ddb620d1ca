"""Checks that documents and rows of a micro-batch stay isolated, and that no token sees later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from accel_scale.start_check.rows import TinyBatch
from accel_scale.start_check.steps import same_draws

if TYPE_CHECKING:
    from torch import nn

# Relative to the logits' size. A leak through one layer of attention, a state or a convolution changes them by 1% of
# their size or more, rounding by less than 1e-5.
_TOLERANCE = 1e-4

Leak = Literal["none", "ahead", "others"]


def find_leak(model: nn.Module, batch: TinyBatch, logits: torch.Tensor) -> Leak:
    """Find out where a change in the second half of one document has effects that it must not have.

    Args:
        logits: Output of `model` for `batch.inputs` in training mode.

    Returns:
        ``ahead`` if earlier tokens of the same document change, so the model is not causal; ``others`` if other
        documents or rows change; else ``none``.
    """
    inputs = {name: value for name, value in batch.changed.items() if name != "labels"}
    same_draws()
    with torch.no_grad():
        changed = model(**inputs, use_cache=False).logits
    moved = (changed.float() - logits.float()).abs().amax(-1)
    limit = _TOLERANCE * max(1.0, logits.float().abs().amax().item())
    noticed = ~(moved <= limit)  # NaN counts as changed
    if (noticed & batch.before).any():
        return "ahead"
    return "others" if (noticed & batch.others).any() else "none"
