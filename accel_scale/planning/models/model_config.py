"""Model facts from a Hugging Face config.json, read as transformers 5 reads it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.planning.models.config_defaults import ALIASES, DEFAULTS, OWN_WIDTHS
from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.families import llama_like_facts
from accel_scale.planning.models.families_gpt import FAMILIES
from accel_scale.planning.models.families_latent import LATENT
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.styles import STYLES

MODEL_TYPES: tuple[str, ...] = tuple(sorted({*STYLES, *FAMILIES, *LATENT}))


def facts_from_config(config: Mapping[str, Any], *, name: str, place: str | None = None) -> ModelFacts:
    """Shapes and parameters of the causal language model that transformers builds from a config.

    Missing fields take the defaults of the transformers class. For a Gemma 3 with images (``gemma3``) this is the
    language model, without the vision tower.

    Args:
        config: The contents of a ``config.json``.
        name: Name of the model.
        place: Where the config came from, for error messages.

    Raises:
        ConfigError: if the architecture is not modelled or a field has an impossible value.
    """
    place = place or name
    if not isinstance(config, Mapping):
        raise ConfigError("the config is not a JSON object.", place=place, fix="give the model's config.json.")
    model_type = config.get("model_type")
    if model_type == "gemma3" and isinstance(config.get("text_config"), Mapping):
        return facts_from_config(_gemma3_text(config), name=name, place=place)
    if not isinstance(model_type, str) or model_type not in {*MODEL_TYPES, *STYLES}:
        raise _not_modelled(model_type, place)
    values = _common_names(model_type, config)
    if model_type in STYLES:
        fields = ConfigFields(values, STYLES[model_type].defaults, place)
        return llama_like_facts(fields, STYLES[model_type], name=name, model_type=model_type)
    fields = ConfigFields(values, DEFAULTS[model_type], place)
    return {**FAMILIES, **LATENT}[model_type](fields, name=name, model_type=model_type)


def _gemma3_text(config: Mapping[str, Any]) -> dict[str, Any]:
    tied = config.get("tie_word_embeddings", True)
    return {"tie_word_embeddings": tied, **config["text_config"], "model_type": "gemma3_text"}


def _common_names(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the class's own names replaced by the common ones; a `None` alias leaves the default."""
    unread = ("intermediate_size",) if model_type in OWN_WIDTHS else ()
    values = {name: value for name, value in config.items() if name not in unread}
    for own, common in ALIASES.get(model_type, {}).items():
        if values.get(own) is not None:
            values[common] = values[own]
    return values


def _not_modelled(model_type: object, place: str) -> ConfigError:
    if not isinstance(model_type, str):
        return ConfigError("the config has no model_type.", place=place, fix="add the architecture's model_type.")
    near = difflib.get_close_matches(model_type, MODEL_TYPES, n=1)
    nearest = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"the architecture {model_type!r} is not modelled.",
        place=place,
        fix=f"{nearest}use one of {', '.join(MODEL_TYPES)}.",
    )
