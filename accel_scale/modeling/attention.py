"""The attention implementation of a run, and whether it isolates packed documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.device import PACKED_ATTENTION, check_attention_name
from accel_scale.modeling.model_class import numbers_of_layers
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.modeling.packed_mask import with_known_mask

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from accel_scale.facts.device import Device
    from accel_scale.modeling.packing.row_facts import RowFacts

_FLASH_INSTALL = {
    "flash_attention_2": "pip install --no-build-isolation 'accel-scale[flash]' on a machine with CUDA",
    "flash_attention_3": "build the hopper folder of github.com/Dao-AILab/flash-attention",
}
_FLASH_MAX_HEAD_SIZE = 256
# Layers that read other positions only through attention, whose mask or layout isolates documents.
_ISOLATING_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def resolve_attention(
    requested: str | None, *, device: Device, dtype: torch.dtype, packing: bool, model_config: Any
) -> str:
    """The attention implementation for `from_pretrained(attn_implementation=…)`; exactly `requested` if that is given.

    Without a request: flash_attention_2 on CUDA if it is installed and supported; otherwise `sdpa_packed` for packed
    rows and where SDPA has no flash kernel (an older card, or fp32), the only kernel for grouped heads; otherwise
    sdpa, or eager for a model that supports nothing else.

    Args:
        requested: A name, a `kernels-community/…` repository, or None.
        device: Device that the model trains on.
        dtype: Dtype in which attention computes (the autocast dtype, if there is one).
        packing: True if rows hold several documents, which must not see each other.
        model_config: The model's `PreTrainedConfig`.

    Raises:
        ConfigError: if the request cannot be honoured here.
    """
    model_class = _model_class(model_config)
    if requested is None:
        return _default_attention(device, dtype, packing, model_config, model_class)
    check_attention_name(requested, place="--attn_implementation")
    if "/" in requested:
        return _check_kernel(requested, device.type)
    if requested in _FLASH_INSTALL:
        _check_flash(requested, device, dtype, model_config, model_class)
    elif requested == "flex_attention":
        _check_flex(device.type, model_class)
    elif requested in ("sdpa", PACKED_ATTENTION) and not _has_sdpa(model_config, model_class):
        raise _refuse(f"{_name(model_class)} has no SDPA attention, or caps its attention logits.", "use eager.")
    if requested == PACKED_ATTENTION:
        if not _supports(model_class, "_supports_attention_backend"):
            raise _refuse(f"{_name(model_class)} does not use transformers' attention interface.", "use sdpa.")
        register_packed_attention()
    return requested


def score_matrix_note(
    attention: str, *, device: Device, dtype: torch.dtype, model_config: PreTrainedConfig
) -> str | None:
    """A note if SDPA, requested by name, would form whole score matrices; None otherwise.

    transformers (5.23, `use_gqa_in_sdpa`) leaves groups of query heads to SDPA on any card, and on NVIDIA's only the
    flash kernel supports them: others fall back to products of length × length in fp32.
    """
    text = model_config.get_text_config()
    heads, size = numbers_of_layers(text, "num_attention_heads"), _head_size(model_config) or 0
    keys = numbers_of_layers(text, "num_key_value_heads") or heads
    grouped = set(keys) != set(heads) and size <= _FLASH_MAX_HEAD_SIZE
    if attention != "sdpa" or not grouped or not device.is_nvidia or _shares_key_heads(device, dtype, size):
        return None
    return (
        f"{device.name} has no kernel for grouped heads in {str(dtype).removeprefix('torch.')}: sdpa forms scores of "
        f"length × length in every layer; --attn_implementation {PACKED_ATTENTION} computes the same without them."
    )


def check_packing_strategy(strategy: str) -> None:
    """Refuse TRL packing strategies whose rows lose the boundaries between documents.

    ``bfd`` and ``bfd_split`` keep the length of each document (or piece), from which position ids restart at zero and
    attention is isolated; ``wrapped`` concatenates and cuts, and documents see their neighbours.

    Raises:
        ConfigError: for ``wrapped``.
    """
    if strategy == "wrapped":
        raise ConfigError(
            "packing strategy 'wrapped' lets packed documents see each other.",
            place="--packing_strategy",
            fix="use bfd, or bfd_split, which keeps the overflow of long documents as rows of their own.",
        )


def choose_kernels(device: Device, *, lengths_vary: bool) -> bool:
    """Disable cuDNN in SDPA if lengths change from batch to batch: it compiles a plan for each, which takes seconds.

    Rows of one length keep it, because it is the fastest for them. Call once per process, before the first step.

    Returns:
        True if cuDNN was disabled.
    """
    ruled_out = lengths_vary and device.plans_attention_per_shape
    if ruled_out:
        import torch

        torch.backends.cuda.enable_cudnn_sdp(False)
    return ruled_out


def with_document_lengths(inputs: dict[str, Any], attention: str, facts: RowFacts | None = None) -> dict[str, Any]:
    """Add what `attention` needs to know about the documents in the rows; taken from `facts` on the host if given.

    FlashAttention takes the lengths of all documents. transformers finds them in the positions of a single row only;
    with more rows it would attend over whole rows. Every row begins with position 0.
    """
    positions, tokens = inputs.get("position_ids"), inputs.get("input_ids")
    known = facts if facts is not None and facts.document_lengths is not None and tokens is not None else None
    if known is not None and attention == PACKED_ATTENTION:
        return with_known_mask(inputs, known)
    if "flash" not in attention or "cu_seq_lens_q" in inputs or inputs.get("attention_mask") is not None:
        return inputs
    if known is not None:
        return {**inputs, **known.flash_arguments(inputs["input_ids"].device)}
    if positions is None or positions.shape[0] == 1:
        return inputs
    import torch

    starts = (positions.flatten() == 0).nonzero().flatten()
    ends = torch.tensor([positions.numel()], device=positions.device)
    lengths = torch.cat([starts, ends]).to(torch.int32)
    longest = int(lengths.diff().max())
    names = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": longest, "max_length_k": longest}
    return {**inputs, **names}


def _default_attention(device: Device, dtype: Any, packing: bool, config: Any, model_class: Any) -> str:
    if device.type == "cuda":
        try:
            _check_flash("flash_attention_2", device, dtype, config, model_class)
        except ConfigError:
            pass
        else:
            return "flash_attention_2"
    if not _has_sdpa(config, model_class):
        return "eager"
    size = min(_head_size(config) or 0, _FLASH_MAX_HEAD_SIZE)
    is_served = device.has_flash_kernel and _shares_key_heads(device, dtype, size)
    if (packing or not is_served) and _supports(model_class, "_supports_attention_backend"):
        return register_packed_attention()
    return "sdpa"


def _shares_key_heads(device: Device, dtype: torch.dtype, size: int) -> bool:
    half = str(dtype) in ("torch.float16", "torch.bfloat16")
    return device.shares_key_heads(half=half, masked=False, key_size=size, value_size=size)


def _check_flash(requested: str, device: Device, dtype: object, config: PreTrainedConfig, model_class: object) -> None:
    import torch

    elsewhere = f"use sdpa, or {PACKED_ATTENTION} for packed rows."
    if (refusal := device.flash_refusal(requested)) is not None:
        raise _refuse(f"{refusal}.", elsewhere)
    if dtype not in (torch.float16, torch.bfloat16):
        raise _refuse(
            f"{requested} computes in fp16 or bf16 and this run in {str(dtype).removeprefix('torch.')}.",
            f"set --precision bf16, or {elsewhere}",
        )
    if not _supports(model_class, "_supports_flash_attn"):
        raise _refuse(f"{_name(model_class)} does not support flash attention.", elsewhere)
    head_size = _head_size(config)
    if head_size is not None and (head_size > _FLASH_MAX_HEAD_SIZE or head_size % 8):
        raise _refuse(
            f"{requested} takes head sizes that are multiples of 8 up to {_FLASH_MAX_HEAD_SIZE}, this model has "
            f"{head_size}.",
            elsewhere,
        )
    if requested not in device.flash:
        raise _refuse(f"{requested} is not installed.", f"{_FLASH_INSTALL[requested]}, or {elsewhere}")


def _check_flex(device_type: str, model_class: object) -> None:
    if device_type == "cpu":
        raise _refuse(
            "flex_attention has no backward pass on a CPU.", f"use sdpa, or {PACKED_ATTENTION} for packed rows."
        )
    if not _supports(model_class, "_supports_flex_attn"):
        raise _refuse(f"{_name(model_class)} does not support flex_attention.", "use sdpa.")


def _has_sdpa(config: PreTrainedConfig, model_class: object) -> bool:
    """True if SDPA can compute this model's attention: it cannot cap logits, as Gemma 2 does."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return _supports(model_class, "_supports_sdpa") and not capped


def _check_kernel(requested: str, device_type: str) -> str:
    from transformers.utils import is_kernels_available

    if device_type == "cpu":
        raise _refuse(f"{requested} is a kernel for accelerators and this run is on a CPU.", "use sdpa.")
    if not is_kernels_available():
        raise _refuse(
            f"{requested} is downloaded by the kernels package, which is not installed.", "pip install kernels."
        )
    return requested


def check_can_isolate(config: PreTrainedConfig, packing_flag: str) -> None:
    """Refuse packing by the configuration alone, for models of which the start check cannot build a small one.

    Raises:
        ConfigError: if the model has layers known to carry a state; `packing_flag` switches packing off.
    """
    model_class = _model_class(config)
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    mixing = layer_types - _ISOLATING_LAYER_TYPES
    # Recurrent, state-space and linear attention layers carry a state across the whole row.
    if mixing or getattr(model_class, "_is_stateful", False):
        layers = f" ({', '.join(sorted(mixing))} layers)" if mixing else ""
        raise ConfigError(
            f"{config.model_type} models{layers} carry a state from one packed document into the next.",
            place=packing_flag.split()[0],
            fix=f"switch packing off for this model: {packing_flag}.",
        )


def _model_class(config: PreTrainedConfig) -> object:
    """The causal language model class for `config`, or None for remote code."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def _supports(model_class: object, flag: str) -> bool:
    """transformers' own class flag; True for remote code, which transformers itself checks when loading."""
    return model_class is None or bool(getattr(model_class, flag, False))


def _name(model_class: Any) -> str:
    return model_class.__name__ if model_class is not None else "this model"


def _head_size(config: PreTrainedConfig) -> int | None:
    """The largest head size of all layers."""
    text_config = config.get_text_config()
    if sizes := numbers_of_layers(text_config, "head_dim"):
        return max(sizes)
    hidden, heads = getattr(text_config, "hidden_size", None), numbers_of_layers(text_config, "num_attention_heads")
    return hidden // min(heads) if hidden and heads else None


def _refuse(problem: str, fix: str) -> ConfigError:
    return ConfigError(problem, place="--attn_implementation", fix=fix)
