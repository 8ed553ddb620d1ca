"""Timed steps of a model of a given size, for sweeps over DDP's or DeepSpeed's bucket sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accel_scale.errors import ConfigError

# Vocabularies of models given by size; small ones would otherwise be nothing but embedding.
_VOCABULARY, _SMALL_VOCABULARY, _SMALL = 32768, 2048, 20e6
# Weights, gradients and DDP's buckets in fp32; the rest of the memory is for activations and others.
_BYTES_PER_PARAM = 12
_SHARE_OF_MEMORY = 0.8
# Times are taken in rounds over all sizes, so that other load on the machine affects all of them.
ROUNDS = 3
_WARM_UP = 2


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep.

    Attributes:
        model: A catalogue name, a folder or a config.json; None uses `num_params`.
        num_params: Parameters of a Llama-like model; None uses `model`.
        caps: Values of ``bucket_cap_mb``.
        rows, length: Shape of the batch on each process.
        repeats: Timed steps for each size.
    """

    model: str | None
    num_params: float | None
    caps: tuple[float, ...]
    rows: int = 1
    length: int = 128
    repeats: int = 15

    def check(self, processes: int) -> None:
        """Refuse a model that does not fit on this machine once per process.

        Raises:
            ConfigError: naming the largest size that fits, or for a size that no sensible model has.
        """
        import torch

        from accel_scale.facts.hardware import host_memory_bytes
        from accel_scale.modeling.scratch import choose_shape

        count = self.count
        if torch.cuda.is_available():
            limit, sharing = torch.cuda.get_device_properties(0).total_memory, 1
        else:
            limit, sharing = host_memory_bytes() or 2**62, processes
        largest = limit * _SHARE_OF_MEMORY / sharing / _BYTES_PER_PARAM
        if count > largest:
            raise ConfigError(
                f"{count / 1e9:.3g}B parameters do not fit here {processes} times over, with gradients and buckets.",
                place="--model" if self.model else "--num_params",
                fix=f"use --num_params {largest / 1e6:.0f}M or less: what counts is how long backward takes.",
            )
        if self.num_params is not None:
            choose_shape(round(self.num_params), self.vocabulary)

    @property
    def count(self) -> float:
        """Number of parameters."""
        if self.num_params is not None:
            return self.num_params
        from accel_scale.planning.models.catalogue import load_model_facts

        assert self.model is not None
        return float(load_model_facts(self.model).num_params)

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of a model given by size."""
        return _SMALL_VOCABULARY if (self.num_params or _SMALL) < _SMALL else _VOCABULARY


def made_model(settings: SweepSettings) -> Any:
    """Build the model with random weights in fp32."""
    import torch
    from transformers import AutoConfig, LlamaConfig

    from accel_scale.modeling.scratch import choose_shape, model_from_nothing
    from accel_scale.planning.models.catalogue import catalogue_config

    if settings.num_params is not None:
        shape = choose_shape(round(settings.num_params), settings.vocabulary)
        config: Any = LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            tie_word_embeddings=shape.tied,
        )
    else:
        known = catalogue_config(str(settings.model))
        if known is not None:
            config = AutoConfig.for_model(known.pop("model_type"), **known)
        else:
            config = AutoConfig.from_pretrained(str(settings.model))
    return model_from_nothing(config, dtype=torch.float32, attention=None, seed=0).train()


def slowest_times(
    step: Callable[[], None], steps: int, device: Any, *, before: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of `steps` calls of `step` after a warm-up, each on the slowest rank; collective."""
    import torch
    import torch.distributed as dist

    found = []
    for index in range(_WARM_UP + steps):
        before()
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= _WARM_UP:
            found.append(time.perf_counter() - started)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def noise(seconds: Sequence[float], steps_per_round: int) -> float:
    """Relative difference between the slowest and the fastest round of the same work."""
    rounds = [low(seconds[at : at + steps_per_round]) for at in range(0, len(seconds), steps_per_round)]
    return max(rounds) / min(rounds) - 1


def low(seconds: Sequence[float]) -> float:
    """The largest of the fastest fifth, since other load on the machine only ever adds time."""
    ordered = sorted(seconds)
    return ordered[max(0, -(-len(ordered) // 5) - 1)]
