"""The class that loads a checkpoint: a language model, the text model of a multimodal one, or one that scores rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_SCORING = "ForSequenceClassification"
# Set on in-memory configurations of models trained on images: some types also have a text model of their own.
_ON_IMAGES = "_trained_on_images"


def language_model_class(config: PreTrainedConfig) -> Any:
    """transformers' auto class for `config`: `AutoModelForCausalLM`, or the one for images or for scoring rows.

    A checkpoint with a vision tower is loaded with it, so that the saved checkpoint is of the same kind.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if scores_rows(config):
        return AutoModelForSequenceClassification
    if getattr(config, _ON_IMAGES, False):
        return AutoModelForImageTextToText
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (
        AutoModelForImageTextToText
        if has_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForCausalLM
    )


def scores_rows(config: PreTrainedConfig) -> bool:
    """True if `config` is of a model that scores rows, like a reward model, and predicts no tokens."""
    return has_scores(config.architectures or ())


def has_scores(architectures: Sequence[str]) -> bool:
    """Same as `scores_rows`, from the names of the model's classes."""
    return any(name.endswith(_SCORING) for name in architectures)


def as_reward_model(config: PreTrainedConfig, *, name: str, place: str = "--model_name_or_path") -> None:
    """Turn `config` into that of a reward model on the same layers: a head with one score replaces the vocabulary's.

    Raises:
        ConfigError: if transformers has no such model of this type, or `config` has another number of scores.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    if scores_rows(config):
        refuse_classes(config.num_labels, name=name, place=place)
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ConfigError(
            f"transformers has no model of the type {config.model_type} that scores rows.",
            place=place,
            fix="give a model of another type, such as Llama, Qwen or Gemma.",
        )
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
    config.num_labels = 1


def as_image_model(config: PreTrainedConfig, *, name: str, place: str = "--model_name_or_path") -> None:
    """Turn `config` into that of the model with its vision parts.

    Raises:
        ConfigError: if the model takes no images.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(
            f"{name!r} takes no images: it is a model of text ({config.model_type}).",
            place=place,
            fix="give a vision-language model, or train it on text with recipes/sft.py.",
        )
    setattr(config, _ON_IMAGES, True)


def refuse_classes(num_labels: int | None, *, name: str, place: str) -> None:
    """Refuse a model that scores rows with more than the one score of a reward model.

    Raises:
        ConfigError: if its number of scores is not 1.
    """
    if num_labels != 1:
        raise ConfigError(
            f"{name!r} sorts rows into {num_labels} classes, and a reward model gives one score.",
            place=place,
            fix="give a language model, or a reward model to go on with.",
        )


def refuse_reward_model(config: PreTrainedConfig, *, name: str, place: str = "--model_name_or_path") -> None:
    """Same as `refuse_scoring`, from the model's configuration."""
    refuse_scoring(config.architectures or (), name=name, place=place)


def refuse_scoring(architectures: Sequence[str], *, name: str, place: str) -> None:
    """Refuse a model that scores rows if a language model is to be trained.

    Raises:
        ConfigError: if it is such a model.
    """
    if has_scores(architectures):
        raise ConfigError(
            f"{name!r} scores rows ({architectures[0]}) and predicts no tokens.",
            place=place,
            fix="give the language model that it was made of; recipes/reward.py goes on with this one.",
        )


# Names in transformers' decoders; a dropout missing in a configuration is missing in the model.
DROPOUTS = (
    "attention_dropout", "attn_pdrop", "attn_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop",
    "embedding_dropout", "emb_dropout_prob", "resid_pdrop", "residual_dropout", "hidden_dropout",
    "hidden_dropout_prob", "activation_dropout", "dropout",
)  # fmt: skip


def set_dropout(config: PreTrainedConfig, probability: float, *, place: str = "--model_dropout") -> None:
    """Set every dropout of `config` to `probability`.

    Raises:
        ConfigError: if the model has no dropout.
    """
    found = dict.fromkeys(dropouts_of(config), probability)
    if not found:
        raise ConfigError(
            f"models of the type {config.model_type} have no dropout.",
            place=place,
            fix="remove it; --lora_dropout drops what goes into adapters.",
        )
    config.update(found)


def dropouts_of(config: PreTrainedConfig) -> dict[str, float]:
    """The dropouts set in `config`, for `from_pretrained`, which reads the configuration again."""
    return {name: value for name in DROPOUTS if isinstance(value := getattr(config, name, None), (int, float))}


def refuse_other_models(config: PreTrainedConfig, *, name: str, place: str) -> None:
    """Refuse models that are not text decoders: encoder-decoders, encoders, models of images or sound only.

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


def numbers_of_layers(config: PreTrainedConfig, name: str) -> list[int]:
    """The values of `name` in a configuration: one for all layers or, where layers differ (Gemma 4's heads), one each.

    Such configurations raise an error if the common value is read.
    """
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
    else:
        found = getattr(config, name, None)
        values = list(found) if isinstance(found, list | tuple) else [found]
    return [value for value in values if isinstance(value, int) and value]
