"""Memory during generation: what is kept of earlier tokens, and the forward passes over prompts and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.families import family_of
from accel_scale.planning.traced.forward import forward_bytes
from accel_scale.planning.traced.kept import KeptLayer, traced_kept


@dataclass(frozen=True)
class GenerationBytes:
    """Peak memory of generation besides weights and optimizer states.

    Attributes:
        cache_bytes: Keys and values of all layers.
        pass_bytes: The forward pass at that moment.
    """

    cache_bytes: float
    pass_bytes: float

    @property
    def total_bytes(self) -> float:
        """The sum of both."""
        return self.cache_bytes + self.pass_bytes


def generation_bytes(model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool = True) -> GenerationBytes:
    """The higher of two moments: the pass over the prompts, and the last token with a full cache.

    Keys and values are in transformers' `DynamicCache`, which appends by copying one layer at a time. Layers with a
    window keep only that many tokens, but hold all of a prompt until it has been read. What a traced model keeps is
    read from its own cache. Prompts are padded to one length, so attention over them is masked.

    Args:
        model: Shapes of the model.
        setup: The setup as the layers see it (`generation` says what is written); only dtypes matter.
        is_cuda: Whether CUDA's kernels run.

    Raises:
        ConfigError: for a model that keeps earlier tokens outside transformers' cache.
    """
    generation = setup.generation
    assert generation is not None
    rows, prompt = generation.rows, generation.prompt_length
    length = generation.total_length
    layers = kept_layers(model, setup)
    reading = replace(setup, micro_batch_size=rows, sequence_length=prompt, packing=False, mean_length=None)
    # Answers of a batch start at the same position: shorter prompts are padded.
    reading = replace(reading, mean_length=prompt - 0.5 if rows > 1 and prompt > 1 else None)
    read = forward_bytes(model, reading, is_cuda=is_cuda, draws=True)
    one = replace(setup, micro_batch_size=rows, sequence_length=1, packing=False, mean_length=None)
    write = forward_bytes(model, one, is_cuda=is_cuda, draws=True)
    # Appending copies keys, then values; fused kernels treat the heads of a group as rows, eager attention repeats.
    copied = max(max(layer.part_bytes(rows, length)) for layer in layers)
    share = model.num_heads / model.num_kv_heads if setup.attention == "eager" else 1.0
    repeated = max(layer.attended_bytes(rows, length) for layer in layers) * share if share > 1 else 0.0
    # What the last token was drawn from stays until the next is drawn; tokens and masks take 8 bytes each.
    drawn = 2 * rows * model.vocab_size * 4
    tokens = 2 * 8 * rows * length
    last = tokens + max(write.layers_bytes + drawn + max(copied, repeated), write.head_bytes)
    moments = [
        GenerationBytes(_total(layers, rows, prompt, reads=True), read.peak_bytes),
        GenerationBytes(_total(layers, rows, length), last),
    ]
    return max(moments, key=lambda moment: moment.total_bytes)


def cache_bytes(model: ModelFacts, setup: TrainingSetup, rows: int, length: int) -> float:
    """Bytes that all layers keep of `rows` × `length` tokens.

    Raises:
        ConfigError: for a model that keeps it elsewhere than in transformers' cache.
    """
    return _total(kept_layers(model, setup), rows, length)


def _total(layers: Sequence[KeptLayer], rows: int, length: int, *, reads: bool = False) -> float:
    return sum(layer.count * sum(layer.part_bytes(rows, length, reads=reads)) for layer in layers)


def kept_layers(model: ModelFacts, setup: TrainingSetup) -> tuple[KeptLayer, ...]:
    """What each layer keeps: keys and values if it is modelled, the observed content of its cache if it is traced.

    Rotated keys have the wider of the products' dtype and the hidden states', which is that of the position tables.

    Raises:
        ConfigError: for a model that keeps it elsewhere than in transformers' cache.
    """
    if model.traced_config:
        return traced_kept(model, setup)
    family = family_of(model)
    hidden = setup.trained_bytes if setup.trains_all else setup.frozen_bytes
    compute = setup.compute_bytes if setup.autocast else hidden
    turns = family.rotation not in ("none", "halves") and bool(model.rotary_dims) and family.rotation_type == "input"
    key = max(compute, hidden) if turns else compute
    heads = model.num_kv_heads
    parts = ((0.0, heads * model.head_dim * key), (0.0, heads * (model.value_dim or model.head_dim) * compute))
    return tuple(KeptLayer(layer.count, layer.sliding_window, parts) for layer in model.layers)
