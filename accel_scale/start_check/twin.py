"""A small model of the run's configuration in fp32 on the CPU; every factor of its loss has a visible effect."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel_scale.errors import first_line

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 512
# A larger twin would take more than a second; it has a size that cannot be shrunk.
MAX_PARAMETERS = 30_000_000
# Lower ids are special tokens.
FIRST_PLAIN_TOKEN = 8
# Standard deviation of the twin's logits: a 2% change of scale, or a cap at 50, changes the loss by 1% or more.
_LOGIT_STD = 8.0


class NoTwin(Exception):
    """No small model of this configuration can be built; the message gives the reason."""


def build_twin(
    config: PreTrainedConfig, *, attention: str, trust_remote_code: bool = False, seed: int = 0
) -> PreTrainedModel:
    """Build a small model of `config`'s class without dropout and with stirred weights. Call it in `undisturbed`.

    Raises:
        NoTwin: if the configuration cannot be shrunk, or not enough.
    """
    import torch

    from accel_scale.modeling.model_class import language_model_class

    try:
        tiny = tiny_config(config)
        options: dict[str, Any] = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
        with torch.device("meta"):
            num_parameters = language_model_class(config).from_config(copy.deepcopy(tiny), **options).num_parameters()
        if num_parameters <= MAX_PARAMETERS:
            torch.default_generator.manual_seed(seed)
            model: PreTrainedModel = language_model_class(config).from_config(tiny, dtype=torch.float32, **options)
    except Exception as error:  # an unknown kind of configuration may raise anything
        raise NoTwin(f"{type(error).__name__}: {first_line(error)[:200]}") from error
    if num_parameters > MAX_PARAMETERS:
        raise NoTwin(f"it still has {num_parameters:,} parameters after shrinking")
    model.config.use_cache = False
    without_dropout(model)
    stir(model, seed)
    return model


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` shrunk to the twin's size."""
    from accel_scale.shrinking.shrink import shrink_model_config

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tiny = shrink_model_config(copy.deepcopy(config), vocab_size=VOCAB_SIZE, **special)
    tiny.use_cache = False
    return tiny


def attach_adapter(model: PreTrainedModel, adapter: PeftConfig, *, seed: int = 0) -> Any:
    """The twin with the run's adapters, moved away from their zero initialisation."""
    from peft import get_peft_model

    peft_model = get_peft_model(model, copy.deepcopy(adapter))
    without_dropout(peft_model)
    stir(peft_model, seed, only_trainable=True)
    return peft_model


def without_dropout(model: torch.nn.Module) -> None:
    """Disable dropout, so that forward passes of `model` in training mode are reproducible."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and _is_noise(name):
                setattr(module, name, 0.0)
        config = vars(module).get("config")
        for holder in {id(c): c for c in _configs(config)}.values():
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and _is_noise(name):
                    setattr(holder, name, 0.0)


def _configs(config: Any) -> list[Any]:
    return [] if config is None or not hasattr(config, "to_dict") else [config, config.get_text_config()]


def _is_noise(name: str) -> bool:
    return any(part in name for part in ("dropout", "pdrop", "layerdrop", "drop_path"))


def stir(model: torch.nn.Module, seed: int, *, only_trainable: bool = False) -> None:
    """Move the weights away from their initial values, so that each of them affects the loss.

    Matrices preserve a vector's length, embeddings have entries of size one, the head's logits have a standard
    deviation of `_LOGIT_STD`, and zeros and ones (biases, norms, LoRA's B) get noise.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    head_weight = getattr(head, "weight", None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or (only_trainable and not parameter.requires_grad):
                continue
            std = parameter.float().std().item() if parameter.numel() > 1 else 0.0
            noise = torch.empty(parameter.shape).normal_(generator=generator)
            is_state = any(part in name.lower() for part in ("a_log", "dt_bias", "decay", "time_"))
            if std < 1e-6:
                parameter.add_(noise, alpha=0.1)
            elif parameter.ndim < 2 or is_state:
                continue
            elif parameter is head_weight:
                parameter.copy_(noise * (_LOGIT_STD / parameter.shape[-1] ** 0.5))
            elif id(parameter) in embeddings:
                parameter.copy_(noise)
            else:
                parameter.mul_(max(1.0, min(parameter.shape[-2:]) ** -0.5 / std))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Build and run models in fp32 on the CPU, in this process alone and without output.

    RNG states, default dtype and device, autocast and transformers' state of a sharding engine are restored
    afterwards. Device generators are not touched, so training starts with the same bits as without the check.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from accel_scale.modeling.loading import plain_loading

    python_state, default_dtype = random.getstate(), torch.get_default_dtype()
    disabled = logging.root.manager.disable
    with (
        plain_loading(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default_dtype)
            logging.disable(disabled)
            random.setstate(python_state)
            # Warnings shown once in here must be shown again for the real model.
            transformers_logging.warning_once.cache_clear()
