"""Several layers that are recomputed together: only the input of the first one is kept."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

_ATTRIBUTE = "_recomputed_segments"


class Segments:
    """A stack of layers, called one after the other, in segments that the backward pass recomputes as a whole.

    Layers run where their model calls them, under hooks that drop their saved tensors; the arguments that the model
    passes to each of them are recorded. torch's non-reentrant checkpoint calls them again in a chain.

    Args:
        owner: The module whose forward pass calls the layers.
        layers: The layers in the order of their calls.
        num_layers: Layers per segment; the last segment may be shorter.
    """

    def __init__(self, owner: nn.Module, layers: Sequence[nn.Module], num_layers: int) -> None:
        self._layers, self._num_layers = list(layers), num_layers
        self._calls: list[tuple[nn.Module, tuple[object, ...], dict[str, object]]] = []
        self._open: Generator[None, None, None] | None = None
        self._output: object = None
        self._is_recomputing = False
        self._handles: list[RemovableHandle] = [owner.register_forward_hook(self._leave, always_call=True)]
        for index, layer in enumerate(self._layers):
            enter, exit_ = functools.partial(self._enter, index), functools.partial(self._exit, index)
            self._handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(exit_, prepend=True))
        setattr(owner, _ATTRIBUTE, self)

    def _enter(self, index: int, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        import torch

        if self._is_recomputing or not layer.training or not torch.is_grad_enabled():
            return
        place = index % self._num_layers
        if place == 0:
            self._begin(layer, args, kwargs)
            return
        if self._open is None or len(self._calls) != place or not args or args[0] is not self._output:
            raise _not_a_chain(layer)
        self._output = None
        self._calls.append((layer, args[1:], kwargs))

    def _begin(self, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        # torch offers this as a context only here, in the form used by its own composable checkpoint: `checkpoint`
        # wants a function that calls all layers, but the model calls them. Checked on torch 2.13.
        from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

        if self._open is not None or not args:
            raise _not_a_chain(layer)
        calls = self._calls = [(layer, args[1:], kwargs)]
        again = functools.partial(self._again, calls)
        self._open = _checkpoint_without_reentrant_generator(
            again, True, noop_context_fn, "default", False, True, args[0]
        )
        next(self._open)

    def _again(self, calls: list[tuple[nn.Module, tuple[object, ...], dict[str, object]]], x: object) -> None:
        before, self._is_recomputing = self._is_recomputing, True
        try:
            for layer, args, kwargs in calls:
                x = _first(layer(x, *args, **kwargs))
        finally:
            self._is_recomputing = before

    def _exit(self, index: int, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        if self._open is None or self._is_recomputing:
            return
        is_last = (index + 1) % self._num_layers == 0 or index + 1 == len(self._layers)
        if not is_last:
            self._output = _first(output)
            return
        segment, self._open, self._calls = self._open, None, []
        next(segment, None)

    def _leave(self, owner: nn.Module, args: tuple[object, ...], output: object) -> None:
        """End the model's forward pass; if it failed in the middle of a segment, remove the segment's hooks."""
        if self._open is None or self._is_recomputing:
            return
        segment, self._open, self._calls, self._output = self._open, None, [], None
        segment.close()
        if output is not None:
            raise _not_a_chain(owner)

    def remove(self) -> None:
        """Restore the layers."""
        for handle in self._handles:
            handle.remove()


def split_into_segments(owner: nn.Module, layers: Sequence[nn.Module], num_layers: int) -> None:
    """Recompute `layers`, which `owner` calls in this order, in segments of `num_layers`."""
    Segments(owner, layers, num_layers)


def release_segments(module: nn.Module) -> None:
    """Undo `split_into_segments` for the layers of `module`, if it was done."""
    segments = vars(module).pop(_ATTRIBUTE, None)
    if segments is not None:
        segments.remove()


def _first(output: object) -> object:
    return output[0] if isinstance(output, tuple) else output


def _not_a_chain(module: nn.Module) -> ConfigError:
    return ConfigError(
        f"hidden states do not go from layer to layer as they are at {type(module).__name__}: layers cannot be "
        "recomputed together.",
        place="--checkpointing_policy",
        fix="use full or every_2.",
    )
