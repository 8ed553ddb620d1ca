"""The parts of a model's layers by name, and which of them are computed in slices of the rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence

import torch
from torch import nn

from accel_scale.errors import ConfigError
from accel_scale.modeling.tiling.tiles import Forward, run_in_tiles

# transformers' names for the parts of a layer.
_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "ff", "block_sparse_moe", "moe")
_EXPERT_NAMES = ("experts", "router")


def tile_layers(model: nn.Module, layers: Sequence[nn.Module], *, name: str, rows: int | None = None) -> None:
    """Run the MLPs and norms of `layers`, and the norm after them, over slices of the rows; gradients are unchanged.

    MLPs with experts are left alone: their slices are the tokens that each expert gets. So are norms that are a single
    kernel, which keeps only its input.

    Args:
        model: The model that contains the layers.
        name: Name of the model, for messages.
        rows: Tokens per slice; None uses the hidden size.

    Raises:
        ConfigError: if a layer has no separate module for the MLP, or one that takes more than hidden states.
    """
    for layer in layers:
        found = _mlp_of(layer)
        if found is None or not (_has_experts(found) or _takes_one_tensor(found)):
            own = "no module of its own for the MLP"
            what = own if found is None else f"an MLP ({type(found).__name__}) that takes more than hidden states"
            raise ConfigError(
                f"the layers of {name} have {what}, which cannot be computed in slices.",
                place="--long_rows",
                fix="use --checkpointing_policy offload, which keeps the layers' inputs in host memory.",
            )
    for layer in layers:
        found = _mlp_of(layer)
        if found is not None and not _has_experts(found):
            _tile(found, rows)
    for parent in (*layers, *_parents(model, layers)):
        for child in parent.children():
            if _is_norm(child):
                _tile(child, rows)


def _parents(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that hold the stacks of `layers`, and the norm after them."""
    known = {id(layer) for layer in layers}
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.ModuleList) and any(id(i) in known for i in child) for child in module.children())
    ]


def _is_norm(module: nn.Module) -> bool:
    kind = type(module)
    is_fused = kind.__module__.startswith("liger_kernel") or "forward" in module.__dict__
    return kind.__name__.endswith("Norm") and not is_fused and not list(module.children())


def num_with_experts(model: nn.Module) -> int:
    """Number of layers of `model` with an MLP of experts, which `tile_layers` leaves alone."""
    found = [part for module in model.modules() if (part := _mlp_of(module)) is not None]
    return sum(map(_has_experts, found))


def part_of(layer: nn.Module, kind: str) -> nn.Module:
    """The ``attention`` or ``mlp`` module of a layer.

    Raises:
        ConfigError: if the layer has no separate module for it.
    """
    children = dict(layer.named_children())
    found = _mlp_of(layer) if kind == "mlp" else next((children[n] for n in _ATTENTION_NAMES if n in children), None)
    if found is None:
        raise ConfigError(
            f"{type(layer).__name__} has no module of its own that is its {kind}.",
            place="--checkpointing_policy",
            fix="use full, every_2 or selective.",
        )
    return found


def dense_mlp(model: nn.Module, layer: nn.Module) -> nn.Module | None:
    """The MLP of a layer of `model` if it is used there alone and treats each token separately, without experts."""
    found = _mlp_of(layer)
    if found is None or _has_experts(found) or not _takes_one_tensor(found):
        return None
    is_shared = sum(module is found for _, module in model.named_modules(remove_duplicate=False)) > 1
    only_matrices = all(parameter.ndim <= 2 for parameter in found.parameters())
    return found if only_matrices and not is_shared else None


def untile_layers(model: nn.Module) -> None:
    """Restore every module's own forward."""
    for module in model.modules():
        if _is_tiled(module):
            del module.forward


def _mlp_of(layer: nn.Module) -> nn.Module | None:
    children = dict(layer.named_children())
    return next((children[name] for name in _MLP_NAMES if name in children), None)


def _tile(module: nn.Module, rows: int | None) -> None:
    module.forward = functools.partial(_tiled_forward, module, module.forward, rows)
    _tell_zero3(module)


def _is_tiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is _tiled_forward


def _tiled_forward(module: nn.Module, forward: Forward, rows: int | None, x: torch.Tensor) -> torch.Tensor:
    return run_in_tiles(module, forward, x, rows or x.shape[-1])


def _has_experts(module: nn.Module) -> bool:
    names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    return not names.isdisjoint(_EXPERT_NAMES)


def _takes_one_tensor(module: nn.Module) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    return len([p for p in parameters if p.default is inspect.Parameter.empty]) == 1


def _tell_zero3(module: nn.Module) -> None:
    """Make ZeRO-3 gather the module's weights once around its call, not for each linear layer in each slice."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled() and list(module.children()):
        from deepspeed.utils import set_z3_leaf_module

        set_z3_leaf_module(module, True)
