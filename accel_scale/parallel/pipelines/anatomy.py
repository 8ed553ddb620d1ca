"""Where a causal language model can be split: its list of layers, and the modules that run before and after them.

This needs no knowledge of any architecture. The model is run once, on two tokens and with its layers skipped, to see
the order in which its other modules are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.parallel.pipelines.modules import Skipped

if TYPE_CHECKING:
    import torch
    from torch import nn

PLACE = "--pp_size"


@dataclass(frozen=True)
class Anatomy:
    """Names of a model's parts.

    Attributes:
        layers: Name of the `ModuleList` of layers, e.g. ``model.layers``.
        num_layers: Number of its layers.
        before: Names of modules that run before the first layer, on the first stage: embeddings, their norms.
        after: Names of modules that run after the last layer and belong to the last stage: the final norm, the head.
        embedding: Name of the input embedding's weight.
        head: Name of the head's weight.
        tied: True if those two are one parameter.
        in_tuple: True if layers return hidden states in a tuple.
    """

    layers: str
    num_layers: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    embedding: str
    head: str
    tied: bool
    in_tuple: bool


def dissect(model: Any) -> Anatomy:
    """Analyse `model`, a `PreTrainedModel` with a causal language model's head.

    Runs its embeddings once: a collective if those are tensor-parallel.

    Raises:
        ConfigError: if it cannot be split: adapters, encoders, layers that read more than the hidden states of the
            previous layer, modules that a plain text does not run.
    """
    name = type(model).__name__
    layers = _find_layers(model)
    head = model.get_output_embeddings()
    if head is None:
        raise _cannot_split(name, "it has no head of a causal language model")
    outside = _outside_modules(model, layers)
    names = {id(module): key for key, module in model.named_modules(remove_duplicate=False)}
    head_name = names[id(head)]
    order, in_tuple = _call_order(model, layers, outside)
    before: list[str] = []
    after = [head_name]
    for key, module in outside.items():
        calls = order.get(key, [])
        if key == head_name:
            continue
        if not calls:
            if any(True for _ in module.parameters()):
                raise _cannot_split(name, f"{key} takes no part in reading a text")
        elif "before" in calls and "after" in calls:
            raise _cannot_split(name, f"{key} runs before its layers and after them")
        else:
            (before if "before" in calls else after).append(key)
    embedding_name = names[id(model.get_input_embeddings())] + ".weight"
    return Anatomy(
        layers=layers,
        num_layers=len(model.get_submodule(layers)),
        before=tuple(before),
        after=tuple(after),
        embedding=embedding_name,
        head=head_name + ".weight",
        tied=model.get_input_embeddings().weight is head.weight,
        in_tuple=in_tuple,
    )


def _cannot_split(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be split into pipeline stages: {why}.",
        place=PLACE,
        fix="use 1, and tensor or fully sharded data parallelism instead.",
    )


def _find_layers(model: nn.Module) -> str:
    """Name of the list with as many modules as the configuration has layers, and with the most parameters."""
    from torch import nn
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise _cannot_split(name, "it is no plain model of transformers (adapters are not supported)")
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = {
        key: sum(parameter.numel() for parameter in module.parameters())
        for key, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    }
    if not found:
        raise _cannot_split(name, f"it has no list of {wanted} layers")
    return max(found, key=lambda key: found[key])


def _outside_modules(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """Modules outside the list of layers and outside its containers, by name."""
    path = layers.split(".")
    found = {}
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        for key, child in model.get_submodule(prefix).named_children():
            if key != path[depth]:
                found[f"{prefix}.{key}" if prefix else key] = child
    return found


def _call_order(model: nn.Module, layers: str, outside: dict[str, nn.Module]) -> tuple[dict[str, list[str]], bool]:
    """For each module outside the layers, ``before`` or ``after`` for each of its calls relative to the layers.

    Also returns whether layers return tuples: with the wrong stand-ins the model fails or returns no hidden states.
    """
    problem = "its layers return more than hidden states"
    for in_tuple in (False, True):
        try:
            calls, seen, shape = _run_without_layers(model, layers, outside, in_tuple=in_tuple)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            problem = f"it does not run without its layers ({str(error).splitlines()[0]})" if str(error) else problem
            continue
        if len(shape) == 3 and shape[:2] == (1, 2):
            _check_layer_inputs(type(model).__name__, seen)
            return calls, in_tuple
    raise _cannot_split(type(model).__name__, problem)


def _run_without_layers(
    model: Any, layers: str, outside: dict[str, nn.Module], *, in_tuple: bool
) -> tuple[dict[str, list[str]], list[tuple[Any, ...]], tuple[int, ...]]:
    """Calls of modules, arguments of layers, and shape of the last hidden states, for one row of two tokens."""
    import torch

    calls: dict[str, list[str]] = {}
    moment = ["before"]
    seen: list[tuple[Any, ...]] = []
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.get_input_embeddings().weight.device)

    def at_layer(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        moment[0] = "after"
        seen.append((args, kwargs))

    stack: Any = model.get_submodule(layers)
    own = list(stack)
    handles = [
        module.register_forward_pre_hook(lambda *_, key=key: calls.setdefault(key, []).append(moment[0]))
        for key, module in outside.items()
    ]
    try:
        for index, layer in enumerate(own):
            stack[index] = Skipped(layer, in_tuple=in_tuple)
            stack[index].register_forward_pre_hook(at_layer, with_kwargs=True)
        with _evaluating(model):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for index, layer in enumerate(own):
            stack[index] = layer
        for handle in handles:
            handle.remove()
    return calls, seen, tuple(hidden.shape)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout; keep gradients, which show what a layer's inputs depend on."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        model.train(was_training)


def _check_layer_inputs(name: str, calls: list[tuple[Any, ...]]) -> None:
    """Refuse layers that need another stage's weights or leave state for later layers."""
    import torch
    from torch.utils._pytree import tree_leaves

    for args, kwargs in calls:
        beside = [*args[1:], *(value for key, value in kwargs.items() if key != "hidden_states")]
        if any(isinstance(value, dict | list) for value in beside):
            raise _cannot_split(name, "its layers share state with each other")
        tensors: list[torch.Tensor] = [leaf for leaf in tree_leaves(beside) if isinstance(leaf, torch.Tensor)]
        if any(tensor.requires_grad for tensor in tensors):
            raise _cannot_split(name, "its layers read the embeddings beside the layer before them")
