"""Configuration and tokenizer of a rehearsed model: from the hub, a folder, or the catalogue."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError, first_line
from accel_scale.launching.hub_reach import unreachable_hub
from accel_scale.modeling.model_class import refuse_other_models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin


def load_model_config(
    name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The configuration of `name_or_path`, with all its parts if it has several; reads no weights.

    If the hub cannot be reached or requires a login, the planner's catalogue is used: it has those of popular models.

    Raises:
        ConfigError: if neither has it, or it is not a text decoder.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    from accel_scale.planning.models.catalogue import catalogue_config

    path = Path(name_or_path)
    source = str(path.parent) if path.name == "config.json" and path.is_file() else name_or_path
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=_is_out_of_reach(name_or_path), **options)
    except (OSError, ValueError) as error:
        known = None if path.exists() else catalogue_config(name_or_path)
        if known is not None and known["model_type"] in CONFIG_MAPPING:
            return AutoConfig.for_model(known.pop("model_type"), **known)
        raise ConfigError(
            f"the configuration of {name_or_path!r} cannot be had: {first_line(error)}.",
            place="--model_name_or_path",
            fix="download its config.json once and give that file, or its folder.",
        ) from error
    refuse_other_models(config, name=name_or_path, place="--model_name_or_path")
    return config


def own_tokenizer(
    name_or_path: str, *, revision: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None if it cannot be loaded."""
    from transformers import AutoTokenizer

    path = Path(name_or_path)
    source = str(path.parent) if path.is_file() else name_or_path
    if path.exists() and not any(file.name.startswith("tokenizer") for file in os.scandir(source)):
        return None
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=_is_out_of_reach(name_or_path), **options)
    except (OSError, ValueError):
        return None


def own_processor(name_or_path: str, *, revision: str | None, trust_remote_code: bool) -> ProcessorMixin | None:
    """The processor of a model with images, or None if it cannot be loaded or the model has none."""
    from transformers import AutoProcessor, ProcessorMixin

    path = Path(name_or_path)
    source = str(path.parent) if path.is_file() else name_or_path
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        found = AutoProcessor.from_pretrained(source, local_files_only=_is_out_of_reach(name_or_path), **options)
    except (OSError, ValueError, ImportError, TypeError, KeyError, AttributeError):
        return None
    return found if isinstance(found, ProcessorMixin) else None


@functools.lru_cache(maxsize=8)
def _is_out_of_reach(name: str) -> bool:
    """True if the hub does not answer at all. Asks only once, because each load would retry for half a minute."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    if Path(name).exists() or constants.HF_HUB_OFFLINE:
        return False
    if unreachable_hub() is not None:
        return True
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:
        # Connection errors come from the hub client's HTTP library; any answer from the hub is reported when loading.
        return type(error).__module__.startswith("httpx")
    return False
