"""What layers keep of earlier tokens during generation."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import read_trace, tracer, write_trace
from accel_scale.planning.models.training_setup import TrainingSetup


@dataclass(frozen=True)
class KeptLayer:
    """The cache of layers that keep the same amount.

    Attributes:
        count: Number of layers.
        window: Number of tokens that are kept; None: all of them. A prompt is held in full until it has been read.
        parts: For each tensor, the bytes per row and per token of it.
    """

    count: int
    window: int | None
    parts: tuple[tuple[float, float], ...]

    def part_bytes(self, rows: int, length: int, *, reads: bool = False) -> list[float]:
        """Bytes of each tensor of one layer with `length` tokens in total, or in a prompt that was just read.

        Args:
            reads: Whether the tokens are a prompt that was read at once.
        """
        tokens = length if reads or self.window is None else min(length, self.window)
        return [rows * (row + token * tokens) for row, token in self.parts]

    def attended_bytes(self, rows: int, length: int) -> float:
        """Bytes of one layer's keys and values, without states that do not grow."""
        return rows * min(length, self.window or length) * sum(token for _, token in self.parts)


@functools.lru_cache(maxsize=256)
def traced_kept(model: ModelFacts, setup: TrainingSetup) -> tuple[KeptLayer, ...]:
    """What a traced model's own cache holds, from the cached files or by a new trace.

    Raises:
        ConfigError: for a model that keeps its cache elsewhere.
    """
    known = dict(read_trace(model.traced_config).get("kept", {}))
    width = setup.trained_bytes if setup.trains_all else setup.frozen_bytes
    key = json.dumps([width, setup.autocast, setup.attention == "eager"])
    if key not in known:
        known[key] = tracer().kept_layers(model, setup)
        write_trace(model.traced_config, {"kept": known})
    return tuple(
        KeptLayer(**{**layer, "parts": tuple((row, token) for row, token in layer["parts"])}) for layer in known[key]
    )
