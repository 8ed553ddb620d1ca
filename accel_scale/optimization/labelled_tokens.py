"""The last layer for labelled tokens only: no later layer and no loss uses its result for the others.

If three quarters of the tokens have no label, this saves about two thirds of the last layer's matrix products: those
of the MLP, of the queries and of the attention's output. Keys and values are still computed for every token. Loss and
gradients are the same, up to the order of sums.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from accel_scale.modeling.tiling.layers import dense_mlp
from accel_scale.optimization.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTRIBUTE = "_labelled_tokens"
# If more of the tokens have labels, selecting them saves too little to be worth its copies.
_LARGEST_SHARE = 0.9
# Filled up with other tokens to a multiple of this: libraries prepare a matrix product for each new shape, 8-bit
# products need 16 rows, and bf16 products on a CPU are faster with 32.
_MULTIPLE = 32
# Usual names of the products of queries and of outputs, in the order of their calls. A fused product of queries, keys
# and values is computed for all tokens.
_PROJECTIONS = ("q_proj", "o_proj", "out_proj", "dense", "c_proj")


class LabelledTokens:
    """Positions of the current micro-batch that predict a label, as used by modules of the last layer.

    They stay until the modules' backward pass is over, because recomputation runs them again. So there must be one
    backward pass, or none, for each forward pass.

    Args:
        modules: Modules that treat each token separately, in the order of their calls; none is called by another.

    Attributes:
        is_wanted: Whether `only_labelled` uses them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            module.register_forward_pre_hook(functools.partial(self._select, is_first=module is modules[0]))
            module.register_forward_hook(self._spread)
        self.is_wanted = True
        self._index: torch.Tensor | None = None
        self._num_tokens = 0
        self._shape: torch.Size | None = None

    def remember(self, labels: torch.Tensor, num_labels: int | None) -> None:
        """Compute the modules only for the positions before labels; for all if there are few others.

        Args:
            labels: Unshifted, -100 for tokens without a loss. (batch, length)
            num_labels: Number of labels after the first column; None if the host does not know it.
        """
        self.forget()
        size = -(-(num_labels or 0) // _MULTIPLE) * _MULTIPLE
        if not size or size > _LARGEST_SHARE * labels.numel():
            return
        predicts = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL).flatten().ne(IGNORED_LABEL)
        self._index = predicts.byte().argsort(descending=True, stable=True)[:size]
        self._num_tokens = labels.numel()

    def forget(self, *_: object) -> None:
        """Compute the modules for all positions."""
        self._index = self._shape = None

    def _select(
        self, module: nn.Module, args: tuple[torch.Tensor, ...], *, is_first: bool
    ) -> tuple[torch.Tensor, ...] | None:
        """A pre-forward hook: the module's input at the positions."""
        if self._index is None or len(args) != 1 or args[0].shape[:-1].numel() != self._num_tokens:
            return None
        x = args[0]
        if x.requires_grad and is_first:
            x.register_hook(self.forget)
        self._shape = x.shape
        selected = x.flatten(0, -2).index_select(0, self._index.to(x.device))
        return (selected.view(*(1,) * (x.dim() - 2), *selected.shape),)

    def _spread(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor | None:
        """A forward hook: the module's output at the positions, zero elsewhere."""
        if self._shape is None or self._index is None:
            return None
        shape, self._shape = self._shape, None
        rows = output.new_zeros(self._num_tokens, output.shape[-1])
        rows.index_copy_(0, self._index.to(output.device), output.flatten(0, -2))
        return rows.view(*shape[:-1], output.shape[-1])


def skip_unlabelled(model: PreTrainedModel, wanted: bool = True) -> None:
    """Let `only_labelled` restrict the last layer of `model`, unless `wanted` is false.

    Nothing is restricted if that layer has no MLP of its own that treats each token separately. A model that runs its
    layers several times needs all tokens; the start check finds it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    tokens: LabelledTokens | None = getattr(model, _ATTRIBUTE, None)
    if tokens is not None:
        tokens.is_wanted = wanted
        return
    decoder: nn.Module = model.get_decoder() or model
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    mlp = dense_mlp(model, layers[-1]) if layers and wanted else None
    if mlp is not None:
        setattr(model, _ATTRIBUTE, LabelledTokens([*_projections(layers[-1]), mlp]))


def _projections(layer: nn.Module) -> list[nn.Module]:
    """The products of queries and of outputs in the attention of `layer`, as far as they have the usual names."""
    for name, attention in layer.named_children():
        if "attn" in name or "attention" in name:
            found = [getattr(attention, name, None) for name in _PROJECTIONS]
            matrices = [m for m in found if isinstance(m, nn.Module) and all(p.ndim <= 2 for p in m.parameters())]
            if matrices:
                return matrices
    return []


def forget_labelled(model: nn.Module) -> None:
    """Compute all tokens in the next pass, also if the pass before ended with an error."""
    tokens: LabelledTokens | None = getattr(model, _ATTRIBUTE, None)
    if tokens is not None:
        tokens.forget()


@contextlib.contextmanager
def only_labelled(model: nn.Module, labels: torch.Tensor, num_labels: int | None) -> Iterator[None]:
    """Compute the last layer of a `model` prepared by `skip_unlabelled` only where a label counts; see `remember`."""
    tokens: LabelledTokens | None = getattr(model, _ATTRIBUTE, None)
    if tokens is None or not tokens.is_wanted:
        yield
        return
    tokens.remember(labels, num_labels)
    try:
        yield
    finally:
        if not torch.is_grad_enabled():  # no backward pass will follow
            tokens.forget()
