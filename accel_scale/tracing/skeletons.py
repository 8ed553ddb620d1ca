"""The real class of a configuration without weights, and which of its layers stand for all."""

from __future__ import annotations

import contextlib
import copy
import difflib
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
# Attributes of modules that differ from layer to layer and change nothing about their tensors.
_POSITIONS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "idx", "name", "training")


@dataclass
class Skeleton:
    """A model without weights.

    Attributes:
        model: All of it; `keep` takes layers out.
        layers: Its decoder layers; empty where no stack of layers was found.
    """

    model: PreTrainedModel
    layers: nn.ModuleList | None

    def kinds(self) -> list[Kind]:
        """What tells each layer from others: its modules, their shapes and settings."""
        return [_kind(layer) for layer in self.layers] if self.layers is not None else []

    def keep(self, chosen: list[int]) -> None:
        """Leave only the layers `chosen`, in order; lists of the configuration with an entry per layer follow."""
        assert self.layers is not None
        total = len(self.layers)
        kept = [self.layers[index] for index in chosen]
        del self.layers[:]
        self.layers.extend(kept)
        # Parts of a model of several modalities have configurations of their own.
        configs = {id(module.config): module.config for module in self.model.modules() if hasattr(module, "config")}
        for config in configs.values():
            for name, value in list(vars(config).items()):
                # Some classes refuse lists that do not go with the number of layers, which changes with them.
                if isinstance(value, list) and len(value) == total:
                    vars(config)[name] = [value[index] for index in chosen]
                elif name in NUM_LAYERS and value == total:
                    vars(config)[name] = len(chosen)


def build(values: Mapping[str, object], *, dtype: torch.dtype, attention: str | None, place: str) -> Skeleton:
    """The language model of a ``config.json``, made inside a fake or meta context.

    Of a model with pictures or sound this is the language model alone, where transformers has a class for it.

    Raises:
        ConfigError: if transformers cannot build it.
    """
    config = read_config(values, place)
    try:
        options = {"attn_implementation": attention} if attention is not None else {}
        own = copy.deepcopy(config)
        own.architectures = None  # a model that scores rows is planned from its language model
        model = language_model_class(own).from_config(own, dtype=dtype, **options)
    except Exception as error:  # whatever the class's own checks raise
        if attention is not None and "attention implementation" in str(error):
            return build(values, dtype=dtype, attention=None, place=place)
        raise not_built(config.model_type, place, error) from None
    model.config.use_cache = False
    return Skeleton(model.train(), _decoder_layers(model))


def read_config(values: Mapping[str, object], place: str) -> PretrainedConfig:
    """transformers' configuration of the language model in a ``config.json``.

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
    """The refusal of a config that no model comes of."""
    from transformers import CONFIG_MAPPING

    reason = " ".join(str(error).split())[:160] or type(error).__name__
    near = [] if model_type in CONFIG_MAPPING else difflib.get_close_matches(model_type, CONFIG_MAPPING, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"{model_type!r} is not modelled and cannot be built from its config ({reason}).",
        place=place,
        fix=f"{hint}give a config.json that the installed transformers builds a causal language model from.",
    )


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The stack of the language model's layers: of those in no other stack and of its number the largest."""
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and not inside and len(module) > 1:
            stacks[name] = module
    config = model.config.get_text_config(decoder=True)
    numbers = {getattr(config, name, None) for name in NUM_LAYERS}
    # A tower for pictures may have more layers and more parameters.
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
    """Inside, masks are made as for tensors with values, of rows that hold one document each.

    transformers makes whole masks for fake tensors, and asks position ids for borders of documents. Checked on 5.23;
    tests/unit/test_tracing.py fails when either moves.
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
