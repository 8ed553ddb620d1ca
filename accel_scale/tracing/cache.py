"""Size of a model's cache of earlier tokens, from fake prompts of a few lengths."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.traced.kept import KeptLayer
from accel_scale.tracing.adapted import DTYPES
from accel_scale.tracing.blanks import blank
from accel_scale.tracing.cuda_kernels import CudaKernels
from accel_scale.tracing.facts import expert_count
from accel_scale.tracing.recording import Recorder
from accel_scale.tracing.skeletons import build, plain_masks
from accel_scale.tracing.step import body_of, make_fake

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# Short prompts first, since some layers loop over tokens. Longer ones show layers with one entry for many tokens.
_LENGTHS = ((16, 32, 48), (512, 1024, 1536))


def read_cache(facts: ModelFacts, setup: TrainingSetup) -> list[KeptLayer]:
    """Cache of the layers for one row, from passes of the whole model over prompts of three lengths.

    Raises:
        ConfigError: if the model does not use transformers' cache, or sizes are not a constant plus a multiple of the
            length.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = DTYPES[setup.trained_bytes if setup.trains_all else setup.frozen_bytes]
    attention = "eager" if setup.attention == "eager" else None
    with torch.device("meta"):
        skeleton = build(json.loads(facts.traced_config), dtype=dtype, attention=attention, place=facts.name)
    model = skeleton.model.eval()
    recorder = Recorder(mode, adds_in_place=False, is_padded=False, num_experts=max(1, expert_count(model.config)))
    make_fake(model, mode)
    body = body_of(model)

    def kept(length: int) -> list[tuple[int | None, list[int]]]:
        with ExitStack() as stack:
            for context in (torch.no_grad(), plain_masks(), mode, recorder, CudaKernels()):
                stack.enter_context(context)
            if setup.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            output = body(input_ids=blank(mode, (1, length), None, torch.long), use_cache=True)
            return [
                (getattr(layer, "sliding_window", None), _sizes(layer)) for layer in _cache_in(output, facts).layers
            ]

    for lengths in _LENGTHS:
        found = _fitted([kept(length) for length in lengths], lengths)
        if found is not None:
            return found
    raise _unknown(facts, "in sizes that follow no rule")


def _cache_in(output: object, facts: ModelFacts) -> Cache:
    from transformers.cache_utils import Cache, EncoderDecoderCache

    for name in ("past_key_values", "cache_params"):
        cache = getattr(output, name, None)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if isinstance(cache, Cache):
            return cache
    raise _unknown(facts, "elsewhere than in transformers' cache")


def _unknown(facts: ModelFacts, where: str) -> ConfigError:
    return ConfigError(
        f"{facts.model_type} models keep what they know of earlier tokens {where}.",
        place="model",
        fix="plan the training alone, with --recipe sft.",
    )


def _sizes(layer: object) -> list[int]:
    """Bytes of the storages behind a layer's cache."""
    storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in cached_tensors(layer)}
    return [storage.nbytes() for storage in storages.values()]


def cached_tensors(layer: object) -> Iterator[torch.Tensor]:
    """Keys, values and states in one layer of a cache."""
    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                yield tensor


def _fitted(
    runs: Sequence[Sequence[tuple[int | None, list[int]]]], lengths: tuple[int, int, int]
) -> list[KeptLayer] | None:
    """Layers with each tensor as a constant plus a multiple of the length; None if any does not fit."""
    found: Counter[tuple[int | None, tuple[tuple[float, float], ...]]] = Counter()
    for (window, first), (_, second), (_, third) in zip(*runs, strict=True):
        if not len(first) == len(second) == len(third):
            return None
        parts = []
        for a, b, c in zip(first, second, third, strict=True):
            per_token = (b - a) / (lengths[1] - lengths[0])
            if c - b != per_token * (lengths[2] - lengths[1]):
                return None
            parts.append((a - per_token * lengths[0], per_token))
        found[window, tuple(parts)] += 1
    return [KeptLayer(count, window, parts) for (window, parts), count in found.items() if parts]
