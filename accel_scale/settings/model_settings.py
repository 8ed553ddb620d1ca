"""Changes of a run's settings that follow from its model's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.modeling.adapters import lora_config
from accel_scale.modeling.files import check_model_files, check_row_length, longest_rows
from accel_scale.settings.stored_model import unknown_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import LoraConfig
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from accel_scale.settings.resolved import Resolved


def settle_adapters(
    settings: Resolved, model_args: Any, model_config: PretrainedConfig, say: Callable[[str], None]
) -> LoraConfig | None:
    """The adapter configuration of a run, before anything is loaded; None if every weight is trained.

    Args:
        settings: The run's settings; a default that does not suit the model is changed in them.
        model_args: The recipe's flags on adapters.
        model_config: Configuration of the base model.
        say: Prints one line: which linear layers get no adapter.

    Raises:
        ConfigError: as `lora_config`.
    """
    if not settings.trains_adapters:
        return None
    from accel_scale.modeling.loading import skeleton_of

    config = lora_config(
        model_args,
        skeleton_of(model_config, trust_remote_code=bool(settings.values.get("trust_remote_code"))),
        dropout_is_set="lora_dropout" in settings.sources,
        place=lambda name: settings.sources.get(name, f"--{name}"),
        note=say,
    )
    if config.lora_dropout != model_args.lora_dropout:
        settings.set("lora_dropout", config.lora_dropout, "derived: adapters of experts take no dropout")
    return config


def check_model(
    settings: Resolved, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, default_length: int | None
) -> None:
    """Check model, tokenizer and row length; a default length that is too long is reduced to what the model takes."""
    values, sources = settings.values, settings.sources
    if (ends_with := values.get("eos_token")) is not None and ends_with not in tokenizer.get_vocab():
        raise unknown_token(ends_with, sources["eos_token"])
    check_model_files(values["model_name_or_path"], config, tokenizer, place=sources["model_name_or_path"])
    longest = longest_rows(config)
    if "max_length" in values:
        check_row_length(config, values["max_length"], place=sources["max_length"])
    elif longest is not None and default_length is not None and default_length > longest:
        settings.set("max_length", longest, "derived: the model's positions")
