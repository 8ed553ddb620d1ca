"""Counts parameters: adapters, trainable and frozen ones, and what a 4-bit load replaces."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_facts import LinearFacts, ModelFacts
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup

_HEAD, _SCORES = "lm_head", "score"


@dataclass(frozen=True)
class ParameterGroups:
    """The parameters of a model under a training setup. The base's groups add up to `base`.

    Attributes:
        embedding: The token embedding (also the head's, if tied).
        positions: Learned positions.
        layer_linears: Weights and biases of all layers' matrix products.
        layer_norms: Norms of all layers, query and key norms included.
        other: The rest outside the layers: a norm or projections next to the embedding.
        final_norm: The norm before the head.
        head: What the head adds to the embedding.
        largest_layer: The largest single layer.
        lora: Adapters.
        full_copies: Modules trained in full besides adapters: PEFT trains a copy and keeps the original.
        trainable: Parameters with a gradient.
        frozen: Parameters without a gradient, quantised ones included.
        quantised: Weights that QLoRA stores in 4 bits (part of `frozen`); 0 for other methods.
    """

    embedding: int
    positions: int
    layer_linears: int
    layer_norms: int
    other: int
    final_norm: int
    head: int
    largest_layer: int
    lora: int
    full_copies: int
    trainable: int
    frozen: int
    quantised: int

    @property
    def base(self) -> int:
        """Parameters of the model itself, tied ones counted once."""
        layers = self.layer_linears + self.layer_norms
        return self.embedding + self.positions + layers + self.other + self.final_norm + self.head

    def with_gradients(self, setup: TrainingSetup) -> int:
        """Parameters for which memory of a gradient is allocated."""
        return self.trainable + (self.layer_linears + self.layer_norms) * setup.flat_blocks


def parameter_groups(facts: ModelFacts, setup: TrainingSetup) -> ParameterGroups:
    """Parameters of a model by group, and by their role in training.

    Raises:
        ConfigError: if the setup's adapters name a module that the model does not have.
    """
    return _groups(facts, setup.lora if setup.trains_adapters else None, setup.quantises_base)


@functools.lru_cache(maxsize=1024)
def _groups(facts: ModelFacts, adapters: LoraSetup | None, quantises_base: bool) -> ParameterGroups:
    copies = _full_copies(facts, adapters, quantises_base) if adapters else 0
    lora = lora_params(facts, adapters) if adapters else 0
    return ParameterGroups(
        embedding=facts.embedding_params if facts.has_embedding else 0,
        positions=facts.position_params,
        layer_linears=sum(item.num_params * count for item, count in _layer_linears(facts)),
        layer_norms=sum(layer.count * (layer.norm_params + layer.other_params) for layer in facts.layers),
        other=facts.outside_params,
        final_norm=facts.final_norm_params,
        head=facts.head_params,
        largest_layer=max(layer.num_params for layer in facts.layers),
        lora=lora,
        full_copies=copies,
        trainable=lora + copies if adapters else facts.num_params - facts.frozen_params,
        frozen=facts.num_params if adapters else facts.frozen_params,
        quantised=quantised_weights(facts) if quantises_base else 0,
    )


def lora_params(facts: ModelFacts, lora: LoraSetup) -> int:
    """Parameters of the adapters: r·(in + out) for each target, plus a magnitude for each output with DoRA.

    Experts stored as one tensor get an adapter for each expert. Source: LoRA (Hu et al. 2021), section 4.1;
    DoRA (Liu et al. 2024), equation 5; the experts as PEFT 0.21 adapts them.

    Raises:
        ConfigError: if a target is not a module of the model, or cannot be adapted.
    """
    targets = set(lora.targets)
    if targets == {"all-linear"}:
        return sum(count * _adapter_params(item, lora) for item, count in _all_linears(facts) if _names(item))
    matched = [(item, count) for item, count in _all_linears(facts) if _is_target(item, targets)]
    vocab, width = facts.vocab_size, facts.embedding_size or facts.hidden_size
    tables = [LinearFacts(facts.embedding_name, vocab, width)]
    tables += [] if facts.num_scores else [LinearFacts(_HEAD, width, vocab)]
    matched += [(table, 1) for table in tables if table.name in targets]
    known = {name for item, _ in matched for name in _names(item)}
    for target in lora.targets:
        if target not in known:
            raise _unknown_module(facts, target, "lora targets")
    return sum(count * _adapter_params(item, lora) for item, count in matched)


def adapter_rank(item: LinearFacts, lora: LoraSetup) -> int:
    """Total rank of the adapters on one matrix product: r for each name that PEFT targets it by; 0 without one."""
    targets = set(lora.targets)
    is_adapted = targets == {"all-linear"} or _is_target(item, targets)
    return lora.rank * len(_names(item)) if is_adapted else 0


def quantised_linears(facts: ModelFacts) -> tuple[tuple[LinearFacts, int], ...]:
    """The linears that a bitsandbytes 4-bit load replaces (all but the head), each with its number in the model."""
    return tuple((item, count) for item, count in _all_linears(facts) if item.quantisable)


def quantised_weights(facts: ModelFacts) -> int:
    """Weights that a 4-bit load quantises; their biases stay as they are.

    Layers may share weights (Zamba's attention), which are then listed with each of them.
    """
    listed = sum(
        count * item.copies * item.in_features * item.out_features for item, count in quantised_linears(facts)
    )
    return min(listed, facts.layer_params + facts.outside_params)


def _layer_linears(facts: ModelFacts) -> list[tuple[LinearFacts, int]]:
    return [(item, layer.count) for layer in facts.layers for item in layer.linears]


def _all_linears(facts: ModelFacts) -> list[tuple[LinearFacts, int]]:
    return [*_layer_linears(facts), *((item, 1) for item in facts.outside_linears)]


def _names(item: LinearFacts) -> tuple[str, ...]:
    return (item.name,) if item.lora_names is None else item.lora_names


def _is_target(item: LinearFacts, targets: set[str]) -> bool:
    names = _names(item)
    named = targets & set(names)
    if named and len(named) < len(names):
        missing = ", ".join(sorted(set(names) - named))
        raise ConfigError(
            f"{', '.join(sorted(named))} of the experts is stored together with {missing}.",
            place="lora targets",
            fix=f"target {missing} too, or neither.",
        )
    return bool(named)


def _adapter_params(item: LinearFacts, lora: LoraSetup) -> int:
    if lora.dora and item.lora_names is not None:
        raise ConfigError(
            f"{item.name} is stored as a bare tensor, which DoRA cannot adapt.",
            place="lora targets",
            fix="leave the experts and their router out of the targets, or turn DoRA off.",
        )
    rank = lora.rank * len(_names(item))
    return item.copies * rank * (item.in_features + item.out_features) + item.out_features * lora.dora


def _full_copies(facts: ModelFacts, lora: LoraSetup, quantises_base: bool) -> int:
    return sum(_copied_params(facts, name, quantises_base) for name in dict.fromkeys(lora.full_modules))


def _copied_params(facts: ModelFacts, name: str, quantises_base: bool) -> int:
    if name == facts.embedding_name:
        return facts.embedding_params
    if name == _SCORES and facts.num_scores:
        return facts.head_params
    if name == _HEAD and not facts.num_scores:
        return facts.embedding_params + facts.vocab_size * facts.head_bias
    linears = [(item, count) for item, count in _all_linears(facts) if item.name == name and item.copies == 1]
    if not linears:
        raise _unknown_module(facts, name, "modules trained whole")
    if quantises_base and any(item.quantisable for item, _ in linears):
        raise ConfigError(
            f"{name} is quantised and cannot be trained whole.",
            place="modules trained whole",
            fix=f"leave {name} out, or use LoRA on 16-bit weights.",
        )
    return sum(item.num_params * count for item, count in linears)


def _unknown_module(facts: ModelFacts, name: str, place: str) -> ConfigError:
    linears = tuple(dict.fromkeys(part for item, _ in _all_linears(facts) for part in _names(item)))
    near = difflib.get_close_matches(name, (*linears, _HEAD, facts.embedding_name), n=1)
    nearest = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"{facts.name} has no linear {name!r}.",
        place=place,
        fix=f"{nearest}use some of {', '.join(linears)}, or all-linear.",
    )
