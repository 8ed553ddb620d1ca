"""Splits a causal language model into pipeline stages, each a model of the same class with some of its modules.

A part keeps the parameter names of the plain model and runs the model's own forward: modules of other stages are
replaced by modules that do nothing. Order: tensor parallelism and activation checkpointing on the whole model, the
split, then FSDP2 or `replicate` on the parts, then the optimizer.

    layers = stage_boundaries(costs_of(model, length), num_stages)
    parts = split_model(model, layers, stages_of_rank(settings, pp_size, pp_rank))
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.parallel.pipelines.anatomy import Anatomy, dissect
from accel_scale.planning.cost.pipeline import layer_costs, stage_boundaries

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "Stage",
    "costs_of",
    "layer_costs",
    "owned_parameters",
    "split_model",
    "stage_boundaries",
    "stage_layers",
    "stage_of",
]

_ATTRIBUTE = "pipeline_stage"


@dataclass
class Stage:
    """A part's place in the whole model, and how it computes.

    Attributes:
        index: Index of the stage.
        num_stages: Stages of the pipeline.
        layers: Indices of its layers in the plain model.
        layer_names: Their names.
        num_layers: Number of layers of the whole model.
        tied_weight: Name of the embedding on the first stage, or of the head's copy of it on the last one, if the
            model ties them; otherwise None.
        embedding: Name of the embedding, under which a tied weight is stored in a state dict.
        num_items: The last stage's divisor of the sum of cross-entropies.
        loss: ``(part, hidden, labels, num_items=…, shift=…)`` → scalar, on the last stage.
        autocast: Context of every forward pass.
    """

    index: int
    num_stages: int
    layers: range
    layer_names: tuple[str, ...]
    num_layers: int
    tied_weight: str | None = None
    embedding: str = ""
    num_items: torch.Tensor | int = 1
    loss: Callable[..., torch.Tensor] | None = None
    autocast: Callable[[], Any] = field(default=contextlib.nullcontext)

    @property
    def is_first(self) -> bool:
        """True if it takes token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if it returns the loss."""
        return self.index == self.num_stages - 1

    @property
    def holds_copy(self) -> bool:
        """True if its head is a copy of the first stage's embedding."""
        return self.is_last and self.tied_weight is not None


def costs_of(model: Any, sequence_length: int) -> tuple[float, ...]:
    """Costs of the layers of `model` in order, with the head's added to the last, for `stage_boundaries`.

    FLOPs if the planner knows the architecture, otherwise numbers of parameters, which treat a mixture of experts as a
    dense layer.
    """
    try:
        return layer_costs(model.config.get_text_config().to_dict(), sequence_length)
    except ConfigError:
        anatomy = dissect(model)
    layers: Any = model.get_submodule(anatomy.layers)
    costs = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in layers]
    return (*costs[:-1], costs[-1] + model.get_output_embeddings().weight.numel())


def split_model(model: nn.Module, boundaries: Sequence[range], stage_indices: Sequence[int]) -> list[nn.Module]:
    """Return this rank's stages of `model`, which is taken apart: the first part is `model` itself, now unusable.

    A part is called with token ids (batch, length) on the first stage and hidden states (batch, length, hidden size)
    on others, and by name with ``position_ids`` and, on the last one, ``labels`` or ``shift_labels``. It returns
    hidden states; on the last stage the loss if there are labels, otherwise normalised hidden states.

    Memory of modules that are on no stage of this rank is freed once nothing else refers to them. Parameters are the
    model's own objects under their own names; a tied head becomes a copy of the embedding on the last stage, see
    `accel_scale.parallel.pipelines.tied`.

    Args:
        model: A plain `PreTrainedModel` with a causal language model's head, whole and with identical weights on all
            ranks of the pipeline; tensor-parallel or not.
        boundaries: Layers of every stage, from `stage_boundaries`.
        stage_indices: The stages of this rank.

    Raises:
        ConfigError: if the model cannot be split, or boundaries do not cover its layers.
    """
    anatomy = dissect(model)
    _check_boundaries(boundaries, stage_indices, anatomy)
    copies = [model, *(_skeleton(model, {}) for _ in stage_indices[1:])]
    tied = _tied_copy(model, anatomy) if anatomy.tied and len(boundaries) - 1 in stage_indices else None
    for part, index in zip(copies, stage_indices, strict=True):
        _prune(part, anatomy, boundaries, index, tied)
    return copies


def _check_boundaries(boundaries: Sequence[range], stage_indices: Sequence[int], anatomy: Anatomy) -> None:
    layers = [layer for stage in boundaries for layer in stage]
    if layers != list(range(anatomy.num_layers)) or any(not stage for stage in boundaries) or len(boundaries) < 2:
        raise ConfigError(
            f"the boundaries {[(stage.start, stage.stop) for stage in boundaries]} do not divide "
            f"{anatomy.num_layers} layers among two or more stages.",
            place="boundaries",
            fix="use those of stage_boundaries.",
        )
    if not stage_indices or any(not 0 <= index < len(boundaries) for index in stage_indices):
        raise ConfigError(
            f"there are no stages {list(stage_indices)}.", place="stage_indices", fix="name existing ones."
        )


def _skeleton(module: nn.Module, done: dict[int, Any]) -> Any:
    """A new module object for every module in `module`, with the same parameters, buffers and other attributes."""
    if id(module) in done:
        return done[id(module)]
    copy = done[id(module)] = module.__new__(type(module))
    for name, value in vars(module).items():
        copy.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else _skeleton(child, done)
    for name, value in vars(module).items():  # forwards that were replaced on the object
        if isinstance(value, types.MethodType) and value.__self__ is module:
            copy.__dict__[name] = types.MethodType(value.__func__, copy)
    return copy


def _tied_copy(model: nn.Module, anatomy: Anatomy) -> nn.Parameter:
    from torch import nn

    weight = model.get_parameter(anatomy.embedding)
    return nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)


def _prune(part: Any, anatomy: Anatomy, boundaries: Sequence[range], index: int, tied: nn.Parameter | None) -> None:
    """Reduce `part` to stage `index`, and replace its forward by that of a stage."""
    from torch import nn

    from accel_scale.parallel.pipelines.modules import Elsewhere, Inlet, Skipped

    own = boundaries[index]
    stage = Stage(
        index,
        len(boundaries),
        own,
        tuple(f"{anatomy.layers}.{layer}" for layer in own),
        anatomy.num_layers,
        embedding=anatomy.embedding,
    )
    stack: Any = part.get_submodule(anatomy.layers)
    for layer in range(anatomy.num_layers):
        if layer not in own:
            kind = Inlet if layer == own.start - 1 else Skipped
            stack[layer] = kind(stack[layer], in_tuple=anatomy.in_tuple)
    if not stage.is_first:
        for name in anatomy.before:
            module = part.get_submodule(name)
            if any(isinstance(inner, nn.Embedding) for inner in module.modules()):
                _replace(part, name, Elsewhere())
            elif isinstance(module, nn.Dropout) or any(True for _ in module.parameters()):
                _replace(part, name, Skipped(module))
    if not stage.is_last:
        for name in anatomy.after:
            _replace(part, name, Skipped(part.get_submodule(name)))
    elif tied is not None:
        part.get_submodule(anatomy.head.rpartition(".")[0]).weight = tied
    if anatomy.tied and (stage.is_first or stage.is_last):
        stage.tied_weight = anatomy.embedding if stage.is_first else anatomy.head
    setattr(part, _ATTRIBUTE, stage)
    part.forward = types.MethodType(_forward, part)


def _replace(part: Any, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(part.get_submodule(owner), attribute, module)


def _forward(part: Any, inputs: torch.Tensor, **others: Any) -> torch.Tensor:
    """Forward pass of a part; see `split_model`."""
    import torch

    stage = stage_of(part)
    labels = {name: others.pop(name) for name in ("labels", "shift_labels") if name in others}
    with stage.autocast():
        if stage.is_first:
            others["input_ids"] = inputs
        else:
            inlet = part.get_submodule(stage.layer_names[0].rpartition(".")[0])[stage.layers.start - 1]
            # The forward's result from its embeddings is dropped; some modify them in place.
            inlet.received, others["inputs_embeds"] = inputs, torch.zeros_like(inputs)
        hidden: torch.Tensor = part.base_model(use_cache=False, **others).last_hidden_state
        if stage.is_last and labels and stage.loss is not None:
            name, wanted = labels.popitem()
            return stage.loss(part, hidden, wanted, num_items=stage.num_items, shift=name == "labels")
        # Schedules detach sent tensors in place, which views do not allow.
        return hidden.clone() if hidden._is_view() else hidden


def stage_of(part: object) -> Stage:
    """The stage of `part`, which may be wrapped by FSDP2."""
    stage: Stage = getattr(part, _ATTRIBUTE)
    return stage


def stage_layers(part: Any) -> list[nn.Module]:
    """The layers held by `part`, to be wrapped one by one."""
    return [part.get_submodule(name) for name in stage_of(part).layer_names]


def owned_parameters(part: Any) -> dict[str, nn.Parameter]:
    """Parameters of `part` by name that count in norms and are saved: all but the head's copy of a tied embedding."""
    stage = stage_of(part)
    copy = stage.tied_weight if stage.holds_copy else None
    return {name: parameter for name, parameter in part.named_parameters() if name != copy}
