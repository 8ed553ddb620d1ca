"""Builds a tiny model with the architecture of a real one, from its configuration alone.

Launches fail because of the architecture: the kinds of layers and their order, grouped heads, tied embeddings,
experts, fused projections. All of that is kept; only counts and widths shrink. The tiny model therefore has the same
classes, is sharded along the same modules and takes the same LoRA targets, with a few million parameters at most
besides the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.modeling.adapter_targets import is_multimodal
from accel_scale.modeling.model_class import language_model_class
from accel_scale.shrinking.layers import MIN_LAYERS, Stored, first_of, num_layers, set_all, shrink_layers
from accel_scale.shrinking.model_source import load_model_config, own_processor, own_tokenizer
from accel_scale.shrinking.rotation import state_sections
from accel_scale.shrinking.sizes import HEAD_DIM, HIDDEN, NUM_HEADS
from accel_scale.shrinking.widths import shrink_experts, shrink_section, shrink_states, shrink_widths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

MAX_BODY_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class ShrunkenModel:
    """A tiny model written to `folder`, ready for ``from_pretrained``.

    Attributes:
        folder: Folder with configuration, randomly initialised weights and tokenizer.
        architecture: Class of the real and the tiny model, e.g. ``LlamaForCausalLM``.
        num_layers: Layers of the models, ``(real, tiny)``.
        num_parameters: Parameters of the tiny model.
        own_tokenizer: Whether the tokenizer is the real model's.
        has_chat_template: Whether that tokenizer can write conversations.
    """

    folder: Path
    architecture: str
    num_layers: tuple[int, int]
    num_parameters: int
    own_tokenizer: bool
    has_chat_template: bool


def write_shrunken_model(
    name_or_path: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    fallback_tokenizer: str,
    min_layers: int = MIN_LAYERS,
    seed: int = 0,
) -> ShrunkenModel:
    """Shrink the model `name_or_path` (hub id, folder or ``config.json``) and write the tiny one to `folder`.

    Args:
        fallback_tokenizer: Hub id or folder of the tokenizer to use if the model's own cannot be loaded; the
            vocabulary shrinks to it.
        min_layers: Minimum number of layers to keep, if the model has them: a pipeline needs one in each stage.

    Raises:
        ConfigError: if the configuration cannot be loaded, or holds a size of unknown name.
    """
    import torch
    from transformers import AutoTokenizer

    folder = Path(folder)
    config = load_model_config(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    tokenizer = own_tokenizer(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    own = tokenizer is not None
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(fallback_tokenizer)
    vocab_size = None if own else len(tokenizer)
    real_layers = _count_layers(config)
    special = _special_tokens(tokenizer, own)
    tiny = shrink_model_config(config, vocab_size=vocab_size, min_layers=min_layers, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = language_model_class(config).from_config(tiny, trust_remote_code=trust_remote_code)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {id(table.weight): table.weight.numel() for table in tables if table is not None}  # one if they are tied
    body = model.num_parameters() - sum(weights.values())
    if body > MAX_BODY_PARAMETERS:
        raise ConfigError(
            f"{config.model_type} still has {body:,} parameters after shrinking: it holds a size of unknown name.",
            place=name_or_path,
            fix="rehearse with a small model of the same family, given as --model_name_or_path.",
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if own and is_multimodal(config):
        processor = own_processor(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
        if processor is not None:  # image sizes are kept
            processor.save_pretrained(folder)
    layers = (real_layers, _count_layers(tiny))
    return ShrunkenModel(
        folder, type(model).__name__, layers, model.num_parameters(), own, bool(tokenizer.chat_template)
    )


def _count_layers(config: PreTrainedConfig) -> int:
    """Layers of the language model; of its largest stack if it has several (BLT)."""
    values = config.get_text_config(decoder=True).to_dict()
    return max(num_layers(values[name]) for name in config.sub_configs) if _is_stacked(config) else num_layers(values)


def _is_stacked(config: PreTrainedConfig) -> bool:
    """True for BLT: three stacks of layers, for bytes, patches and bytes again, and a model that finds the patches."""
    return hasattr(getattr(config, "global_config", None), "encoder_cross_output_size")


def shrink_config(
    config: PreTrainedConfig,
    *,
    vocab_size: int | None = None,
    min_layers: int = MIN_LAYERS,
    **special_tokens: int | list[int] | None,
) -> PreTrainedConfig:
    """A configuration of the same class with few layers, heads and experts, and small widths.

    Kept: one layer of every kind in their order (sliding and full attention, dense and expert layers, …), at
    least `min_layers`; query heads per key-value head up to 8; the ratio of feed-forward to hidden size; whether
    attention is as wide as the hidden size; tied weights; the vocabulary, unless `vocab_size` replaces it.
    """
    stored = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    aliases = {alias: key for alias, key in config.attribute_map.items() if key in stored and alias not in stored}
    old = {**stored, **{alias: stored[key] for alias, key in aliases.items()}}
    new = dict(old)
    shrink_layers(old, new, min_layers)
    shrink_widths(old, new)
    shrink_experts(old, new)
    shrink_states(new)
    for name in config.sub_configs:
        if isinstance(old.get(name), dict):
            new[name] = shrink_section(old[name], old, new)
    for alias, key in aliases.items():
        value = new.pop(alias)
        if new[key] == stored[key]:  # only its common name is known
            new[key] = value
    if vocab_size is not None:
        new["vocab_size"] = -(-vocab_size // 64) * 64
        if "vocab_size_per_layer_input" in new:
            new["vocab_size_per_layer_input"] = new["vocab_size"]
    new.update(special_tokens)
    small = type(config).from_dict(new)
    state_sections(small)
    return small


def shrink_model_config(
    config: PreTrainedConfig,
    *,
    vocab_size: int | None = None,
    min_layers: int = MIN_LAYERS,
    **special_tokens: int | list[int] | None,
) -> PreTrainedConfig:
    """`shrink_config` for a language model, or for each part of a model that has several.

    A part that is not a language model and has sizes with unknown names keeps its widths and only loses layers.
    """
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    text = config.get_text_config(decoder=True)
    if _is_stacked(config):
        return _shrink_stacks(config, parts, vocab_size, min_layers, special_tokens)
    if text is config or not parts:
        return shrink_config(config, vocab_size=vocab_size, min_layers=min_layers, **special_tokens)
    small = shrink_config(text, vocab_size=vocab_size, min_layers=min_layers, **special_tokens)
    widths = (first_of(text.to_dict(), HIDDEN, default=0), first_of(small.to_dict(), HIDDEN, default=0))
    for name, part in parts.items():
        setattr(config, name, small if part is text else _shrink_other(part, *widths))
    _hand_over(config, config.to_dict(), *widths)
    config.quantization_config = None
    return config


def _shrink_stacks(
    config: PreTrainedConfig,
    parts: Mapping[str, PreTrainedConfig],
    vocab_size: int | None,
    min_layers: int,
    special_tokens: Mapping[str, int | list[int] | None],
) -> PreTrainedConfig:
    """Shrink every stack of layers, and what has to be as wide as another."""
    old = config.to_dict()
    small = {name: shrink_config(part, min_layers=min_layers).to_dict() for name, part in parts.items()}
    # A patch has the states of `cross_attn_k` bytes; if that is not the global width, there is a projection.
    width = small["encoder_config"]["hidden_size"] * old["cross_attn_k"]
    is_direct = old["global_config"]["encoder_cross_output_size"] is None
    width *= 1 if is_direct else 2
    heads = small["global_config"]["num_attention_heads"]
    small["global_config"] |= {"hidden_size": width, "head_dim": width // heads}
    for name in ("encoder_config", "decoder_config"):
        small[name]["hidden_size_global"] = width
    vocabulary = {} if vocab_size is None else {"vocab_size": -(-vocab_size // 64) * 64}
    for name in ("encoder_config", "decoder_config", "patcher_config"):
        small[name] |= vocabulary
    hashes = {"encoder_hash_byte_group_vocab": min(old["encoder_hash_byte_group_vocab"], 512)}
    return type(config).from_dict({**old, **small, **vocabulary, **hashes, **special_tokens})


def _shrink_other(part: PreTrainedConfig, text_width: int, new_text_width: int) -> PreTrainedConfig:
    """Shrink a non-text part; outputs as wide as the language model follow its new width."""
    old = part.to_dict()
    try:
        tiny = shrink_config(part)
        if isinstance(old.get("embed_dim"), int) and "hidden_size" in old:  # Qwen2-VL: its own width and its output's
            tiny.update({"embed_dim": HEAD_DIM * first_of(tiny.to_dict(), ("num_heads", *NUM_HEADS))})
    except (ConfigError, ValueError, TypeError, KeyError):
        values = dict(old)
        set_all(values, ("num_hidden_layers", "num_layers", "depth", "n_layer"), 1)
        tiny = type(part).from_dict(values)
    _hand_over(tiny, old, text_width, new_text_width)
    return tiny


def _hand_over(config: PreTrainedConfig, old: Stored, text_width: int, new_text_width: int) -> None:
    """Keep the outputs of a vision tower as wide as the language model's inputs."""
    names = ["out_hidden_size", "projection_dim", "adapter_out_dim", *(["hidden_size"] if "embed_dim" in old else [])]
    config.update({name: new_text_width for name in names if text_width and old.get(name) == text_width})


def _special_tokens(tokenizer: PreTrainedTokenizerBase, own: bool) -> dict[str, int | None]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {} if own else {name: getattr(tokenizer, name) for name in names}
