"""Builds a configuration's real model class without weights, and finds the kinds of its layers."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel_scale.errors import ConfigError
from accel_scale.modeling.model_class import language_model_class
from accel_scale.quiet import quiet_imports
from accel_scale.shrinking.sizes import NUM_LAYERS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Kind = tuple[object, ...]
# Module attributes that differ between layers but do not affect their tensors.
_POSITIONS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "idx", "name", "training")


@dataclass
class Skeleton:
    """A model without weights.

    Attributes:
        model: The whole model; `keep` removes layers.
        layers: Its decoder layers; None if no stack of layers was found.
        patch_size: Positions of the row for each one that these layers compute.
    """

    model: PreTrainedModel
    layers: nn.ModuleList | None
    patch_size: int = 1

    def kinds(self) -> list[Kind]:
        """Kind of each layer: its modules, their shapes and settings, and which weights it shares with others.

        The first layer that uses a shared weight casts it for autocast, and the last one allocates its gradient.
        """
        layers = list(self.layers or [])
        users: dict[int, list[int]] = {}
        for index, layer in enumerate(layers):
            for parameter in layer.parameters():
                users.setdefault(id(parameter), []).append(index)

        def shared(index: int) -> Kind:
            found = ((name, users[id(parameter)]) for name, parameter in layers[index].named_parameters())
            return tuple((name, used[0] == index, used[-1] == index) for name, used in found if len(used) > 1)

        return [(_kind(layer), shared(index)) for index, layer in enumerate(layers)]

    def keep(self, chosen: list[int], *, counts_all: bool = False) -> None:
        """Keep only the layers `chosen`, in order, and adapt configuration lists with one entry per layer.

        Args:
            counts_all: Leave the number of layers in the configuration, for a model with inputs for each layer.
        """
        assert self.layers is not None
        total = len(self.layers)
        kept = [self.layers[index] for index in chosen]
        del self.layers[:]
        self.layers.extend(kept)
        for place, (index, layer) in enumerate(zip(chosen, kept, strict=True)):
            layer.register_forward_pre_hook(functools.partial(_tell_place, place, index), with_kwargs=True)
        # Parts of a multimodal model have configurations of their own.
        configs = {id(module.config): module.config for module in self.model.modules() if hasattr(module, "config")}
        for config in configs.values():
            for name, value in list(vars(config).items()):
                # Set directly: some classes refuse lists that do not match the number of layers, which also changes.
                if isinstance(value, list) and len(value) == total:
                    vars(config)[name] = [value[index] for index in chosen]
                elif name in NUM_LAYERS and value == total and not counts_all:
                    vars(config)[name] = len(chosen)


def build(values: Mapping[str, object], *, dtype: torch.dtype, attention: str | None, place: str) -> Skeleton:
    """Build the language model of a ``config.json``; call it in a fake or meta context.

    For a model with images or sound, this is the language model alone if transformers has a class for it.

    Raises:
        ConfigError: if transformers cannot build it.
    """
    config = read_config(values, place)
    try:
        options = {"attn_implementation": attention} if attention is not None else {}
        own = copy.deepcopy(config)
        own.architectures = None  # a reward model is planned from its language model
        model = language_model_class(own).from_config(own, dtype=dtype, **options)
    except Exception as error:  # the class's own checks may raise anything
        if attention is not None and "attention implementation" in str(error):
            return build(values, dtype=dtype, attention=None, place=place)
        raise not_built(config.model_type, place, error) from None
    model.config.use_cache = False
    return Skeleton(model.train(), _decoder_layers(model), _assume_patches(model))


def read_config(values: Mapping[str, object], place: str) -> PretrainedConfig:
    """Read transformers' configuration of the language model in a ``config.json``.

    Raises:
        ConfigError: if transformers has no such model, or its class refuses the values.
    """
    quiet_imports()
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    stated = {name: value for name, value in values.items() if name not in ("quantization_config", "model_type")}
    try:
        config = AutoConfig.for_model(str(values.get("model_type")), **stated)
    except Exception as error:
        raise not_built(str(values.get("model_type")), place, error) from None
    text = config.get_text_config(decoder=True)
    return text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config


def not_built(model_type: str, place: str, error: Exception) -> ConfigError:
    """The error for a config from which no model can be built."""
    from transformers import CONFIG_MAPPING

    reason = " ".join(str(error).split())[:160] or type(error).__name__
    near = [] if model_type in CONFIG_MAPPING else difflib.get_close_matches(model_type, CONFIG_MAPPING, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"{model_type!r} is not modelled and cannot be built from its config ({reason}).",
        place=place,
        fix=f"{hint}give a config.json that the installed transformers builds a causal language model from.",
    )


def _tell_place(
    place: int, index: int, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Give a layer that is told its place in the model the one that it had before others were removed (Zamba2)."""
    told = {name: index for name in _POSITIONS if name in kwargs}
    return tuple(index if type(value) is int and value == place else value for value in args), {**kwargs, **told}


def _assume_patches(model: PreTrainedModel) -> int:
    """Give BLT patches of the size in its config, because where they begin depends on the text; return that size."""
    patcher = getattr(model.base_model, "patcher", None)
    if patcher is None or not hasattr(patcher, "patch_lengths_from_entropies"):
        return 1
    # Longer patches would be cut, at places that depend on the text, too.
    limit, model.config.max_patch_length = model.config.max_patch_length, None
    size = min(model.config.patch_size, limit or model.config.patch_size)

    def lengths(entropies: torch.Tensor, sequence_length: int, **settings: object) -> torch.Tensor:
        return entropies.new_full((entropies.shape[0], -(-sequence_length // size)), size, dtype=torch.long)

    patcher.patch_lengths_from_entropies = lengths
    return size


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The language model's stack of layers: the largest top-level stack with its number of layers."""
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and not inside and len(module) > 1:
            stacks[name] = module
    config = model.config.get_text_config(decoder=True)
    numbers = {getattr(config, name, None) for name in NUM_LAYERS}
    # A vision tower may have more layers and more parameters.
    known = [stack for stack in stacks.values() if len(stack) in numbers] or list(stacks.values())
    return max(known, key=lambda stack: sum(p.numel() for p in stack.parameters()), default=None)


def _kind(layer: nn.Module) -> Kind:
    parts: list[object] = []
    for name, module in layer.named_modules():
        settings = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key not in _POSITIONS and isinstance(value, (int, float, str, bool))
        ]
        shapes = [(key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__name__, tuple(settings), tuple(shapes)))
    return tuple(parts)


@contextlib.contextmanager
def plain_masks() -> Iterator[None]:
    """Create masks as for real tensors, for rows that hold one document each.

    transformers creates full masks for fake tensors and looks for document boundaries in position ids. Checked on
    5.23; tests/unit/test_tracing.py fails when either moves.
    """
    from transformers import masking_utils
    from transformers.utils import import_utils

    kept = import_utils.is_fake_tensor, masking_utils.find_packed_sequence_indices
    import_utils.is_fake_tensor = lambda tensor: False  # type: ignore[assignment]
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[assignment]
    try:
        yield
    finally:
        import_utils.is_fake_tensor, masking_utils.find_packed_sequence_indices = kept
