"""Load tokenizer and model: sharded at load if the launch shards, or plain if a whole copy is needed."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_scale.errors import ConfigError, first_line
from accel_scale.modeling.model_class import (
    as_image_model,
    as_reward_model,
    language_model_class,
    refuse_other_models,
    refuse_reward_model,
    scores_rows,
    set_dropout,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_config(
    name: str,
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    dropout: float | None = None,
    rewards: bool = False,
    images: bool = False,
) -> PretrainedConfig:
    """The model's configuration, before any weight is read; `dropout` is set wherever the model has one.

    Args:
        rewards: True for a reward model, or for a model whose layers become one.
        images: True for a model that is trained on images.

    Raises:
        ConfigError: if the folder or hub repository does not exist or cannot be reached, or is of another kind.
    """
    from transformers import AutoConfig

    if _looks_local(name) and not Path(name).is_dir():
        raise ConfigError(
            f"there is no folder {name!r}.",
            place="--model_name_or_path",
            fix="check the path, or give a hub id.",
        )
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model {name!r} cannot be loaded: {first_line(error)}.",
            place="--model_name_or_path",
            fix="check the name, and the connection if it is on the hub.",
        ) from error
    refuse_other_models(config, name=name, place="--model_name_or_path")
    if rewards:
        as_reward_model(config, name=name)
    else:
        refuse_reward_model(config, name=name)
    if images:
        as_image_model(config, name=name)
    if dropout is not None:
        set_dropout(config, dropout)
    return config


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def load_tokenizer(
    name: str, *, revision: str = "main", trust_remote_code: bool = False, place: str = "--model_name_or_path"
) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; one without a padding token pads with its end-of-sequence token.

    Raises:
        ConfigError: if it cannot be loaded; `place` is the flag that names it.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer of {name!r} cannot be loaded: {first_line(error)}.",
            place=place,
            fix="a model folder needs tokenizer.json or its kind beside the weights.",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name: str,
    *,
    dtype: torch.dtype | str,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    revision: str = "main",
    trust_remote_code: bool = False,
    device_map: Any = None,
    rewards: bool = False,
    images: bool = False,
    **model_kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model with its weights in `dtype`; parts for other modalities than text are frozen.

    With `images`, the model class for training on images. With `rewards`, a model that scores rows; a language model's
    layers get a new head with random weights from torch's generator.

    Call after `TrainingArguments` exists: under ZeRO-3 the weights are then partitioned while loading, and under FSDP
    with RAM-efficient loading only rank 0 reads them.

    Raises:
        ConfigError: if the weights or the model class cannot be loaded, or the checkpoint does not match the model.
    """
    from accel_scale.modeling.adapter_targets import freeze_other_parts, keep_clamped_weights
    from accel_scale.modeling.checkpoint_names import remember_used_conversions
    from accel_scale.modeling.load_report import refuse_partial_load

    ignores_shapes = bool(model_kwargs.pop("ignore_mismatched_sizes", False))
    if quantization_config is not None:
        model_kwargs["quantization_config"] = quantization_config
    try:
        config = load_config(
            name, revision=revision, trust_remote_code=trust_remote_code, rewards=rewards, images=images
        )
        if rewards:
            model_kwargs["num_labels"] = config.num_labels
        if quantization_config is not None and not trust_remote_code:
            keep_clamped_weights(quantization_config, skeleton_of(config))
        loaded: Any = language_model_class(config).from_pretrained(
            name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            dtype=dtype,
            attn_implementation=attn_implementation,
            revision=revision,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
            **model_kwargs,
        )
    except OSError as error:
        raise ConfigError(
            f"the weights of {name!r} cannot be loaded: {first_line(error)}.",
            place="--model_name_or_path",
            fix="check the folder or the hub id.",
        ) from error
    model, info = loaded
    if ignores_shapes:
        info["mismatched_keys"] = ()
    if not getattr(model, "_hf_peft_config_loaded", False):  # an adapter's report covers its own weights only
        new, left = changed_head(model) if rewards else (set(), set())
        new = set() if scores_rows(model.config) else new  # as stored in its file
        refuse_partial_load(model, info, name=name, place="--model_name_or_path", may_lack=new, may_leave=left)
    remember_used_conversions(model)
    freeze_other_parts(model)
    model.config.use_cache = False
    return model


def skeleton_of(
    config: PretrainedConfig, attention: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the model of a configuration on the meta device, without memory and in a fraction of a second."""
    import torch

    with plain_loading(), torch.device("meta"):
        model: PreTrainedModel = language_model_class(config).from_config(
            copy.deepcopy(config), attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    model.config.use_cache = False
    return model


def changed_head(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """For a model that scores rows: weight names of its head, and of a language model's head on its layers."""
    config = copy.deepcopy(model.config)
    config.architectures = None
    own, theirs = set(model.state_dict()), set(skeleton_of(config).state_dict())
    return own - theirs, theirs - own


@contextlib.contextmanager
def plain_loading() -> Iterator[None]:
    """Make `from_pretrained` give every rank a whole model inside, even if the launch shards.

    transformers partitions at load if it knows of a ZeRO-3 configuration, and under FSDP with RAM-efficient loading
    leaves weights on the meta device on ranks above 0.
    """
    from transformers.integrations import deepspeed

    # transformers keeps a weak reference to the DeepSpeed configuration in this module variable (checked on 5.23;
    # tests/unit/test_model.py fails if it changes).
    kept_deepspeed = deepspeed._hf_deepspeed_config_weak_ref
    kept_fsdp = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING")
    deepspeed._hf_deepspeed_config_weak_ref = None
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept_deepspeed
        if kept_fsdp is None:
            del os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]
        else:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = kept_fsdp


def add_stop_token(model: Any, tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    """Make generation stop at `token` too."""
    token_id = cast(int, tokenizer.convert_tokens_to_ids(token))
    config = model.generation_config
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stops = [token_id, *(stop for stop in known if stop not in (None, token_id))]
    config.eos_token_id = stops if len(stops) > 1 else token_id


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters; 4-bit weights count as the values they stand for, ZeRO-3 partitions as whole."""
    total = trainable = 0
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", None) or parameter.numel()
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            size = state.shape.numel()
        total += size
        trainable += size if parameter.requires_grad else 0
    return total, trainable
