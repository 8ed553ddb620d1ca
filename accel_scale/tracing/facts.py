"""Reads a model's facts from its real class: counts every parameter and names every matrix product."""

from __future__ import annotations

import functools
import json
import warnings
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from statistics import multimode
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel_scale.modeling.adapter_targets import exclusion, freeze_other_parts, passed_over, untrainable_linears
from accel_scale.modeling.model_class import DROPOUTS, numbers_of_layers
from accel_scale.optimization.head_loss import head_transform
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, MixtureFacts, ModelFacts
from accel_scale.shrinking.sizes import EXPERTS_PER_TOKEN, NUM_EXPERTS
from accel_scale.tracing.skeletons import build

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WEIGHTS = torch.bfloat16
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "chunk_size")


def read_facts(values: Mapping[str, object], *, name: str, place: str) -> ModelFacts:
    """Read shapes and parameters of the model that transformers builds from a ``config.json``.

    Raises:
        ConfigError: if transformers cannot build the model.
    """
    with torch.device("meta"):
        skeleton = build(values, dtype=_WEIGHTS, attention=None, place=place)
    model, config = skeleton.model, skeleton.model.config.get_text_config(decoder=True)
    stack = list(skeleton.layers or [])
    has_stacks = expert_count(config) > 0 and any(value.dim() == 3 for value in model.parameters())
    ranks, unadapted = adapted_by_peft(values, place) if has_stacks else ({}, [])
    bare = [*bare_linears(model), *(model.get_submodule(path) for path in unadapted)]
    adapted = Adapted({id(module) for module in bare}, ranks, _paths(stack, model))
    by_kind: Counter[object] = Counter()
    first: dict[object, nn.Module] = {}
    for layer, kind in zip(stack, skeleton.kinds(), strict=True):
        by_kind[kind] += 1
        first.setdefault(kind, layer)
    layers = tuple(
        replace(_layer_facts(first[kind], count, config, adapted), position_share=1 / skeleton.patch_size)
        for kind, count in by_kind.items()
    )
    outside: tuple[LinearFacts, ...] = ()
    if layers:
        inside = {id(module) for layer in stack for module in layer.modules()} | {id(model.get_output_embeddings())}
        outside = _merged(_linears(model, config, adapted, leaves_out=inside))
    else:
        layers = (LayerFacts(1, _linears(model, config, adapted), (), 0),)
    return _whole(model, layers, outside, name, json.dumps(values, sort_keys=True, default=str))


def _merged(linears: tuple[LinearFacts, ...]) -> tuple[LinearFacts, ...]:
    """`linears`, with those that take no adapter as copies: a tower has hundreds, which no token of text passes."""
    bare = Counter(item for item in linears if item.lora_names == ())
    copies = (replace(item, copies=count * item.copies, active_copies=0) for item, count in bare.items())
    return (*(item for item in linears if item.lora_names != ()), *copies)


def _whole(
    model: PreTrainedModel, layers: tuple[LayerFacts, ...], outside: tuple[LinearFacts, ...], name: str, text: str
) -> ModelFacts:
    config = model.config.get_text_config(decoder=True)
    table: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    head = model.get_output_embeddings()
    hidden = int(_first(config, ("hidden_size", "n_embd", "d_model", "emb_dim")) or table.shape[1])
    heads = int(_first(config, ("num_attention_heads", "n_head", "n_heads", "attention_heads")) or 1)
    kv_heads = int(_first(config, ("num_key_value_heads", "num_kv_heads", "n_kv_heads")) or heads)
    tied = head is not None and head.weight is table
    has_bias = head is not None and getattr(head, "bias", None) is not None
    facts = ModelFacts(
        name=name,
        model_type=model.config.model_type,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(_first(config, ("head_dim",)) or hidden // heads),
        intermediate_size=int(_first(config, ("intermediate_size", "n_inner", "d_inner", "ffn_dim")) or 4 * hidden),
        vocab_size=table.shape[0],
        tied_embeddings=tied,
        gated_mlp=True,
        activation="silu",
        norm="rms",
        layers=layers,
        final_norm_params=hidden,
        head_bias=has_bias,
        # XLNet's -1 means that there is no limit.
        max_positions=max(0, _first(config, ("max_position_embeddings", "n_positions", "max_seq_len")) or 0),
        attention_dropout=max([float(getattr(config, key, 0) or 0) for key in DROPOUTS], default=0.0),
        logit_softcap=head_transform(config)[0] is not None,
        attention_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        layer_variant="traced, scaled logits" if head_transform(config)[1] != 1.0 else "traced",
        embedding_size=0 if table.shape[1] == hidden else table.shape[1],
        embedding_name=_name_of(model, model.get_input_embeddings()),
        outside_linears=outside,
        has_head=head is not None,
        buffer_bytes=sum(value.numel() * value.itemsize for value in model.buffers() if value.dtype is not _WEIGHTS),
        buffer_values=sum(value.numel() for value in model.buffers() if value.dtype is _WEIGHTS),
        traced_config=text,
    )
    rest = sum(parameter.numel() for parameter in model.parameters()) - facts.num_params
    freeze_other_parts(model)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    # Learned positions and norms outside the layers, and what is neither in parts for images or sound.
    return replace(facts, outside_other_params=rest, frozen_params=frozen)


def _layer_facts(layer: nn.Module, count: int, config: PretrainedConfig, adapted: Adapted) -> LayerFacts:
    linears = _linears(layer, config, adapted)
    norms = [module for module in layer.modules() if "norm" in type(module).__name__.lower()]
    norm_params = sum(value.numel() for norm in norms for value in norm.parameters(recurse=False))
    everything = sum(value.numel() for value in layer.parameters())
    products = sum(item.num_params for item in linears)
    experts = [item for item in linears if item.copies > 1]
    mixture = None
    if experts:
        width = min(min(item.in_features, item.out_features) for item in experts)
        mixture = MixtureFacts(experts[0].copies, experts[0].active_copies, width)
    return LayerFacts(
        count=count,
        attention=linears,
        mlp=(),
        norm_params=norm_params,
        num_norms=len(norms),
        sliding_window=_window(layer),
        mixture=mixture,
        other_params=everything - products - norm_params,
    )


def _linears(
    layer: nn.Module, config: PretrainedConfig, adapted: Adapted, leaves_out: Container[int] = ()
) -> tuple[LinearFacts, ...]:
    """Matrix products of a layer; experts are grouped by name, with the number that a token passes through."""
    from transformers.pytorch_utils import Conv1D

    found: Counter[tuple[str, int, int, bool, bool, bool]] = Counter()
    stacked: list[LinearFacts] = []
    num_experts = expert_count(config)
    active = int(_first(config, EXPERTS_PER_TOKEN) or 1)
    names = functools.partial(adapted.names, layer)
    for path, module in layer.named_modules():
        if id(module) in leaves_out:
            continue
        name, is_expert = path.rpartition(".")[2], ".experts." in f".{path}."
        if isinstance(module, (nn.Linear, Conv1D)):
            rows, columns = module.weight.shape
            size = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
            found[(name, *size, module.bias is not None, is_expert, id(module) in adapted.bare)] += 1
            continue
        for key, value in module.named_parameters(recurse=False):
            # Experts that pass their input on have weights in some stacks only.
            if value.dim() == 3 and num_experts and (value.shape[0] == num_experts or names(path, key)):
                copies, rows, columns = value.shape
                stacked.append(LinearFacts(key, rows, columns, False, copies, active, False, names(path, key)))
            elif (value.dim() == 2 and "router" in path) or (key == "weight" and name == "gate" and value.dim() == 2):
                rows, columns = value.shape
                stacked.append(LinearFacts(name or key, columns, rows, quantisable=False, lora_names=names(path, key)))
    single: list[LinearFacts] = []
    for (name, columns, rows, bias, is_expert, is_bare), count in found.items():
        lora_names = () if is_bare else None
        if is_expert and count > 1:
            single.append(LinearFacts(name, columns, rows, bias, count, min(active, count), lora_names=lora_names))
        else:
            single += [LinearFacts(name, columns, rows, bias, lora_names=lora_names)] * count
    return (*single, *stacked)


@dataclass(frozen=True)
class Adapted:
    """What PEFT adapts if every linear is a target.

    Attributes:
        bare: Ids of linears without an adapter.
        ranks: Number of ranks of each adapted parameter that is not a linear, by its path in the model.
        paths: Paths of the layers, by their ids.
    """

    bare: set[int]
    ranks: dict[str, int]
    paths: dict[int, str]

    def names(self, layer: nn.Module, path: str, key: str) -> tuple[str, ...]:
        """`LinearFacts.lora_names` of the parameter `key` of a module of `layer`, one for each of its ranks."""
        full = ".".join(filter(None, (self.paths.get(id(layer), ""), path, key)))
        count = self.ranks.get(full, 0)
        name = path.rpartition(".")[2] if key == "weight" else key
        if count == 2 and name == "gate_up_proj":
            return ("gate_proj", "up_proj")
        return (name,) if count == 1 else tuple(f"{name}.{number}" for number in range(count))


def bare_linears(model: PreTrainedModel) -> list[nn.Module]:
    """Linears without an adapter, and the head."""
    head = model.get_output_embeddings()
    return [*(model.get_submodule(name) for name in untrainable_linears(model)), *([head] if head is not None else [])]


def adapted_by_peft(values: Mapping[str, object], place: str) -> tuple[dict[str, int], list[str]]:
    """What PEFT makes of a model with stacked experts if every linear is a target.

    Returns:
        The number of ranks of each parameter that it adapts although it is not a linear, such as stacked experts; and
        the paths of linears without an adapter, of which PEFT passes over some.
    """
    import peft
    from peft.tuners.lora.layer import ParamWrapper

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(values, dtype=_WEIGHTS, attention=None, place=place).model
        linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        exclude = exclusion(untrainable_linears(model))
        config = peft.LoraConfig(r=1, target_modules="all-linear", exclude_modules=exclude, task_type="CAUSAL_LM")
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError:
            return {}, []
    ranks = {}
    for path, module in adapted.get_base_model().named_modules():
        if isinstance(module, ParamWrapper):
            ranks[f"{path.replace('.base_layer', '')}.{module.parameter_name}"] = int(module.r["default"])
    return ranks, passed_over(linears, adapted)


def _paths(stack: list[nn.Module], model: nn.Module) -> dict[int, str]:
    wanted = {id(layer) for layer in stack}
    return {id(module): path for path, module in model.named_modules() if id(module) in wanted}


def _window(layer: nn.Module) -> int | None:
    for module in layer.modules():
        for name in _WINDOWS[:2]:
            value = getattr(module, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _first(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    """The first of `names` for which `config` has a number; if layers differ, the most common value."""
    return next((max(multimode(found)) for name in names if (found := numbers_of_layers(config, name))), None)


def expert_count(config: PretrainedConfig) -> int:
    """Number of routed experts per layer; 0 if there are none."""
    config = config.get_text_config(decoder=True)
    part = getattr(config, "ffn_config", None)
    return int(_first(config, NUM_EXPERTS) or (_first(part, NUM_EXPERTS) if part is not None else 0) or 0)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next((path.rpartition(".")[2] for path, module in model.named_modules() if module is wanted), "embedding")
