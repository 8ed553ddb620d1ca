"""A model's evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """No gradients, dropout or activation checkpointing; afterwards as before. (inference_mode breaks FSDP2.)"""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
