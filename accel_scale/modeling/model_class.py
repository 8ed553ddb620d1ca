"""Which class loads a checkpoint as a language model: text only, or the text model of a multimodal one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def language_model_class(config: PreTrainedConfig) -> Any:
    """transformers' auto class for `config`: `AutoModelForCausalLM`, or that of models with images.

    A checkpoint with a vision tower is loaded with it, so that what is saved is a checkpoint of the same kind.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (
        AutoModelForImageTextToText
        if has_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForCausalLM
    )


def refuse_other_models(config: PreTrainedConfig, *, name: str, place: str) -> None:
    """Refuse what is no decoder of text: encoder-decoders, encoders, models of images or sound alone.

    Raises:
        ConfigError: naming the architecture.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    fix = "give a causal language model, such as Llama, Qwen or Gemma."
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name!r} is an encoder-decoder ({config.model_type}); these recipes train decoders, and its encoder "
            "would be left out.",
            place=place,
            fix=fix,
        )
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not known and not getattr(config, "auto_map", None):
        raise ConfigError(
            f"{name!r} is not a causal language model: transformers has none of the type {config.model_type}.",
            place=place,
            fix=fix,
        )
