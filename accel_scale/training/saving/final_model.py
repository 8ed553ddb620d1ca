"""The final folder: weights gathered from any sharding, plus everything that plain `from_pretrained` needs."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.ending.user_errors import CheckpointNotSaved
from accel_scale.errors import ConfigError, first_line
from accel_scale.modeling.gathering import (
    adapter_tensors,
    gather_to_main,
    named_tensors,
    unwrap,
)
from accel_scale.modeling.quantization_record import quantization_of, record_quantization
from accel_scale.training.checkpoints.ranks import FailedSomewhere, Meeting
from accel_scale.training.checkpoints.staging import save_atomically
from accel_scale.training.saving.verification import VerifyResult, verify_checkpoint

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def make_base_resolvable(model: nn.Module) -> None:
    """Make a relative path to the base absolute, because the adapter may be loaded from another folder."""
    for config in getattr(unwrap(model), "peft_config", {}).values():
        base = config.base_model_name_or_path
        if base and not os.path.isabs(base) and os.path.isdir(base):
            config.base_model_name_or_path = os.path.abspath(base)


def save_final(
    trainer_or_parts: object,
    output_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> VerifyResult | None:
    """Write a folder that plain `from_pretrained` loads, under any sharding; call it on every process.

    The folder holds the weights (full, or the adapter with the name of its base), configuration, generation
    configuration, tokenizer with its chat template, and how the base was quantised. Only tensors that are written are
    gathered: saving an adapter does not gather its base.

    Args:
        trainer_or_parts: An HF or TRL trainer, or ``(accelerator, model, tokenizer)``; tokenizer may be None.
        output_dir: Existing checkpoints and logs in it are kept.
        dtype: Dtype for floating-point weights; None keeps the dtype they are trained in.
        verify: Read the result back before it is published.

    Raises:
        CheckpointNotSaved: on every process, if it could not be written; `output_dir` is then left as it was.
        CheckpointMismatch: if the files differ from the weights in memory; `output_dir` is then left as it was.
    """
    accelerator, model, tokenizer = _parts(trainer_or_parts)
    base = accelerator.unwrap_model(model, keep_torch_compile=False)
    make_base_resolvable(base)
    make_generation_config_savable(base)
    held = named_tensors(base)
    if hasattr(base, "peft_config"):
        wanted = {id(t) for adapter in base.peft_config for t in adapter_tensors(base, adapter).values()}
        held = {name: tensor for name, tensor in held.items() if id(tensor) in wanted}
    weights = gather_to_main(held, dtype=dtype)
    with save_atomically(output_dir) as staging:
        try:
            Meeting().on_main(partial(_write_all, base, weights, tokenizer, staging, dtype))
        except FailedSomewhere as error:
            raise CheckpointNotSaved(f"the model was not saved into {output_dir}: {error}") from error
        del weights
        return verify_checkpoint(base, staging) if verify else None


def _parts(trainer_or_parts: Any) -> tuple[Any, nn.Module, Any]:
    if isinstance(trainer_or_parts, tuple):
        return trainer_or_parts
    return trainer_or_parts.accelerator, trainer_or_parts.model, trainer_or_parts.processing_class


def _write_all(
    base: object,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    _write(base, weights, folder)
    correct_config(folder, dtype)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    record_quantization(folder, quantization_of(base))


def _write(base: object, weights: dict[str, torch.Tensor], folder: Path) -> None:
    if hasattr(base, "save_pretrained"):
        base.save_pretrained(folder, state_dict=weights)
        return
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def correct_config(folder: Path, dtype: torch.dtype | None = None) -> None:
    """Correct values that `save_pretrained` copies from the training model and that are wrong for the loaded one: the
    key-value cache, switched off for training, and the dtype, if the weights were cast when written."""
    path = folder / "config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    changes: dict[str, Any] = {"use_cache": True} if config.get("use_cache") is False else {}
    if dtype is not None:
        changes["dtype"] = str(dtype).removeprefix("torch.")
    if changes:
        path.write_text(json.dumps({**config, **changes}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make_generation_config_savable(model: nn.Module) -> None:
    """Repair a generation configuration with a temperature but no sampling, which loads but cannot be saved.

    transformers refuses such published configurations once anything in them changes (5.23): at the first save.
    """
    config = getattr(unwrap(model), "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True  # a temperature or top_p implies sampling
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise ConfigError(
                f"the model's generation configuration cannot be saved: {first_line(error)}.",
                place="generation_config.json",
                fix="correct it beside the model.",
            ) from error
