"""What stands in a pipeline stage for modules that other stages hold, so that the model's own forward still runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Skipped(nn.Module):
    """In place of a layer, a norm or a dropout: returns its first argument.

    Keeps the plain attributes of what it replaces, which some forwards read from their layers (``attention_type``).
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, by position or by name."""
        return args[0] if args else kwargs.get("hidden_states")


class Elsewhere(nn.Module):
    """In place of an embedding: a zero that changes nothing it is added to."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states go through; indices become a zero without dimensions, which takes any shape and type."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        floating = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if floating is not None:
            return floating
        return torch.zeros((), device=tensors[0].device if tensors else None)


class Inlet(Skipped):
    """In place of the layer before a stage's first one: hands over what the previous stage has sent.

    Whatever the forward made of it on the way there (GPT-2 adds positions, others scale) is dropped.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__(replaced)
        self.received: torch.Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """The received hidden states, once."""
        received, self.received = self.received, None
        if received is None:
            raise RuntimeError("a pipeline stage ran without hidden states of the stage before it")
        return received
