"""Stand-ins in a pipeline stage for modules of other stages, so that the model's own forward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Skipped(nn.Module):
    """Replaces a layer, a norm or a dropout: returns its first argument.

    Keeps the plain attributes of the replaced module, which some forwards read from their layers (``attention_type``).

    Args:
        replaced: The replaced module.
        in_tuple: True to return hidden states in a tuple, as layers of some older architectures do.
    """

    def __init__(self, replaced: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, by position or by name."""
        return self._returned(args[0] if args else kwargs.get("hidden_states"))

    def _returned(self, hidden: object) -> object:
        return (hidden,) if self._in_tuple else hidden


class Elsewhere(nn.Module):
    """Replaces an embedding table: returns a zero that does not change what it is added to."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a zero without dimensions, which broadcasts to any shape and dtype."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        return torch.zeros((), device=tensors[0].device if tensors else None)


class Inlet(Skipped):
    """Replaces the layer before a stage's first one: returns what the previous stage has sent.

    The forward's own input to this layer is dropped (GPT-2 adds positions, others scale).
    """

    def __init__(self, replaced: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__(replaced, in_tuple=in_tuple)
        self.received: torch.Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the received hidden states, once."""
        received, self.received = self.received, None
        if received is None:
            raise RuntimeError("a pipeline stage ran without hidden states of the stage before it")
        return self._returned(received)
