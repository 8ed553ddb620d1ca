"""A model with random weights: its shape from a number of parameters or a config.json, its weights from the seed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_scale.errors import ConfigError, first_line
from accel_scale.facts.special_floats import read_config_json
from accel_scale.modeling.model_class import refuse_other_models

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_COUNT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmbt]?)\s*", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Width ÷ depth of common models: GPT-2 small 64 at 124M, Llama 7B 128; small models are narrower for their depth.
# (Kaplan et al. 2020, figure 5: loss changes little between 10 and 200.)
_RATIO_AT_124M, _RATIO_EXPONENT, _LARGEST_RATIO = 64.0, 0.15, 128.0
_UNTIED_FROM = 1e9
_TOLERANCE = 0.1


@dataclass(frozen=True)
class Shape:
    """A decoder's shape. `num_params` counts everything, a tied head once."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    tied: bool
    num_params: int


def parse_count(text: str | int | float, *, place: str) -> int:
    """Parse ``124M``, ``2.5B`` or ``1e9`` into a number.

    Raises:
        ConfigError: if `text` is not a positive amount.
    """
    match = _COUNT.fullmatch(str(text))
    try:
        value = float(match.group(1)) * _FACTORS[match.group(2).lower()] if match else float(text)
    except ValueError:
        value = 0.0
    if not (value >= 1 and math.isfinite(value)):
        raise ConfigError(f"{text!r} is not an amount.", place=place, fix="write it like 124M or 2.5B.")
    return round(value)


def choose_shape(num_params: int, vocab_size: int, *, place: str = "--num_params") -> Shape:
    """The Llama-like shape closest to `num_params` with a usual ratio of width to depth.

    Uses heads of 64 (32 in models narrower than 256, 128 from 2048 on), SwiGLU of 8/3 the width in multiples of 64,
    and a head tied to the embedding below a billion parameters.

    Raises:
        ConfigError: if no shape is close, because the vocabulary is too large; names the smallest size that works.
    """
    tied = num_params < _UNTIED_FROM
    wanted_ratio = min(_LARGEST_RATIO, _RATIO_AT_124M * (num_params / 124e6) ** _RATIO_EXPONENT)
    candidates = (
        _shape(width, depth, vocab_size, tied) for width in _widths() for depth in range(2, 129) if width / depth < 400
    )

    def cost(shape: Shape) -> float:
        size = abs(math.log(shape.num_params / num_params))
        ratio = abs(math.log(shape.hidden_size / shape.num_layers / wanted_ratio))
        return size + 0.08 * ratio

    best = min(candidates, key=cost)
    if abs(best.num_params / num_params - 1) > _TOLERANCE:
        smallest = _shape(64, 2, vocab_size, tied).num_params
        raise ConfigError(
            f"no sensible shape has {num_params:,} parameters with a vocabulary of {vocab_size:,}.",
            place=place,
            fix=f"use {smallest / 1e6:.1f}M or more, or a smaller vocabulary.",
        )
    return best


def _widths() -> list[int]:
    return [*range(64, 256, 32), *range(256, 1024, 64), *range(1024, 4096, 128), *range(4096, 16385, 512)]


def _head_size(width: int) -> int:
    return 32 if width < 256 else 64 if width < 2048 else 128


def _shape(width: int, depth: int, vocab_size: int, tied: bool) -> Shape:
    intermediate = math.ceil(width * 8 / 3 / 64) * 64
    layer = 4 * width * width + 3 * width * intermediate + 2 * width
    total = depth * layer + vocab_size * width * (1 if tied else 2) + width
    return Shape(width, depth, width // _head_size(width), intermediate, tied, total)


def config_of_size(num_params: int, *, vocab_size: int, max_length: int, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A `LlamaConfig` of about `num_params` parameters for `tokenizer`'s vocabulary."""
    from transformers import LlamaConfig

    shape = choose_shape(num_params, vocab_size)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=shape.tied,
        **_special_tokens(tokenizer),
    )


def config_from_file(path: str, *, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False) -> Any:
    """The configuration from a config.json (or its folder), with the tokenizer's special tokens.

    Raises:
        ConfigError: if it cannot be read, or its vocabulary is smaller than the tokenizer's.
    """
    from transformers import AutoConfig

    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    place = "--model_config"
    try:
        content = cast("dict[str, object]", read_config_json(file.read_text(encoding="utf-8")))
        model_type = content.pop("model_type")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).", place=place, fix="check the path.") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConfigError(f"{path} is not a model's config.json.", place=place, fix="it needs model_type.") from None
    try:
        if "auto_map" in content:
            config = AutoConfig.from_pretrained(file.parent, trust_remote_code=trust_remote_code)
        else:
            config = AutoConfig.for_model(str(model_type), **content)
    except (ValueError, TypeError) as error:
        reason = first_line(error)
        raise ConfigError(f"{file}: {reason}.", place=place, fix="correct it there.") from None
    if config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"vocab_size is {config.vocab_size:,} but the tokenizer has {len(tokenizer):,} tokens.",
            place=str(file),
            fix=f"write vocab_size: {len(tokenizer)} there, or take another --tokenizer.",
        )
    refuse_other_models(config, name=str(file), place=place)
    for name, value in _special_tokens(tokenizer).items():
        setattr(config, name, value)
    return config


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def model_from_nothing(
    config: PretrainedConfig, *, dtype: torch.dtype, attention: str | None, seed: int
) -> PreTrainedModel:
    """Create a causal language model of `config` with random weights, the same on every rank for one seed.

    Under ZeRO-3 the weights are partitioned as they are created.

    Raises:
        ConfigError: if transformers has no causal language model of this configuration.
    """
    import torch
    from transformers import set_seed

    from accel_scale.modeling.model_class import language_model_class

    set_seed(seed)
    factory = language_model_class(config)
    try:
        model: PreTrainedModel = factory.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except ValueError as error:
        reason = first_line(error)
        raise ConfigError(f"no causal language model can be made: {reason}.", place="--model_config") from None
    model.config.use_cache = False
    # Drawn in fp32 for every final dtype, so that every precision begins with the same weights.
    return model.to(dtype)  # type: ignore[arg-type]  # its decorator hides the signature
