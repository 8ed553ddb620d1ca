"""Memory while a model answers: what it keeps of earlier tokens, and the forward passes over prompts and tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.families import family_of
from accel_scale.planning.traced.forward import forward_bytes


@dataclass(frozen=True)
class GenerationBytes:
    """What generation needs beside weights and optimizer states, at its highest.

    Attributes:
        cache_bytes: Keys and values of all layers.
        pass_bytes: The forward pass at that moment.
    """

    cache_bytes: float
    pass_bytes: float

    @property
    def total_bytes(self) -> float:
        """Both."""
        return self.cache_bytes + self.pass_bytes


def generation_bytes(model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool = True) -> GenerationBytes:
    """The higher of two moments: the pass over the prompts, and the last token with a full cache.

    Keys and values lie in transformers' `DynamicCache`, which appends by copying one layer at a time; layers with a
    window keep as many tokens. Prompts are padded to one length, so that attention over them is masked.

    Args:
        model: Its shapes.
        setup: How the layers see it (`generation` says what is written): weights' and products' types count.
        is_cuda: Whether CUDA's kernels run.

    Raises:
        ConfigError: for a model whose cache is not modelled.
    """
    generation = setup.generation
    assert generation is not None
    rows, prompt = generation.rows, generation.prompt_length
    length = generation.total_length
    key, value = cached_widths(model, setup)
    reading = replace(setup, micro_batch_size=rows, sequence_length=prompt, packing=False, mean_length=None)
    # Answers of one batch start at one place: shorter prompts are padded.
    reading = replace(reading, mean_length=prompt - 0.5 if rows > 1 and prompt > 1 else None)
    read = forward_bytes(model, reading, is_cuda=is_cuda, draws=True)
    one = replace(setup, micro_batch_size=rows, sequence_length=1, packing=False, mean_length=None)
    write = forward_bytes(model, one, is_cuda=is_cuda, draws=True)
    kept = max(min(length, layer.sliding_window or length) for layer in model.layers)
    # Appending copies keys, then values; fused kernels take the heads of one group as rows, eager attention repeats.
    copied = rows * kept * max(key, value)
    repeated = rows * kept * _repeated_width(model, key, value) if setup.attention == "eager" else 0.0
    # What the last token was drawn from stays until the next is, and tokens and masks are 8 bytes each.
    drawn = 2 * rows * model.vocab_size * 4
    tokens = 2 * 8 * rows * length
    last = tokens + max(write.layers_bytes + drawn + max(copied, repeated), write.head_bytes)
    moments = [
        GenerationBytes(cache_bytes(model, setup, rows, prompt), read.peak_bytes),
        GenerationBytes(cache_bytes(model, setup, rows, length), last),
    ]
    return max(moments, key=lambda moment: moment.total_bytes)


def cache_bytes(model: ModelFacts, setup: TrainingSetup, rows: int, length: int) -> float:
    """Keys and values of `rows` × `length` tokens in all layers.

    Raises:
        ConfigError: for a model whose cache is not modelled.
    """
    per_token = sum(cached_widths(model, setup))
    tokens = sum(layer.count * min(length, layer.sliding_window or length) for layer in model.layers)
    return rows * tokens * per_token


def cached_widths(model: ModelFacts, setup: TrainingSetup) -> tuple[float, float]:
    """Bytes of a token's keys and of its values in one layer.

    Turned keys have the wider of the products' type and the hidden states', which the tables of positions have.
    """
    if model.traced_config:
        raise ConfigError(
            f"what {model.model_type} models keep of earlier tokens is not modelled.",
            place="model",
            fix="plan the training alone, with --recipe sft.",
        )
    family = family_of(model)
    hidden = setup.trained_bytes if setup.trains_all else setup.frozen_bytes
    compute = setup.compute_bytes if setup.autocast else hidden
    turns = family.rotation not in ("none", "halves") and bool(model.rotary_dims) and family.rotation_type == "input"
    key = max(compute, hidden) if turns else compute
    heads = model.num_kv_heads
    return heads * model.head_dim * key, heads * (model.value_dim or model.head_dim) * compute


def _repeated_width(model: ModelFacts, key: float, value: float) -> float:
    """Bytes of a token's keys and values, repeated to all heads; 0 where each head has its own."""
    share = model.num_heads / model.num_kv_heads
    return (key + value) * share if share > 1 else 0.0
