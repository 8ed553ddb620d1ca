"""Stand-ins in a pipeline stage for modules of other stages, so that the model's own forward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Skipped(nn.Module):
    """In place of a layer, a norm or a dropout: returns its first argument.

    Keeps the plain attributes of what it replaces, which some forwards read from their layers (``attention_type``).

    Args:
        replaced: The module.
        in_tuple: Whether it returns hidden states in a tuple, as layers of some older architectures do.
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
    """In place of a table of embeddings: a zero that changes nothing it is added to."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A zero without dimensions, which takes any shape and type."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        return torch.zeros((), device=tensors[0].device if tensors else None)


class Inlet(Skipped):
    """In place of the layer before a stage's first one: hands over what the previous stage has sent.

    Whatever the forward made of it on the way there (GPT-2 adds positions, others scale) is dropped.
    """

    def __init__(self, replaced: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__(replaced, in_tuple=in_tuple)
        self.received: torch.Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """The received hidden states, once."""
        received, self.received = self.received, None
        if received is None:
            raise RuntimeError("a pipeline stage ran without hidden states of the stage before it")
        return self._returned(received)
