"""What layers keep of earlier tokens while a model answers."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import read_trace, tracer, write_trace
from accel_scale.planning.models.training_setup import TrainingSetup


@dataclass(frozen=True)
class KeptLayer:
    """The cache of layers that keep the same.

    Attributes:
        count: How many layers.
        window: Tokens that stay of an answer; None: all of them. Of a prompt all lie there until it has been read.
        parts: Of each tensor the bytes of a row, and of each of its tokens.
    """

    count: int
    window: int | None
    parts: tuple[tuple[float, float], ...]

    def part_bytes(self, rows: int, length: int, *, reads: bool = False) -> list[float]:
        """Bytes of each tensor of one layer: with a prompt of `length` tokens just read, or with that many.

        Args:
            reads: Whether the tokens are a prompt that was read at once.
        """
        tokens = length if reads or self.window is None else min(length, self.window)
        return [rows * (row + token * tokens) for row, token in self.parts]

    def attended_bytes(self, rows: int, length: int) -> float:
        """Of keys and values of one layer, without states that do not grow."""
        return rows * min(length, self.window or length) * sum(token for _, token in self.parts)


@functools.lru_cache(maxsize=256)
def traced_kept(model: ModelFacts, setup: TrainingSetup) -> tuple[KeptLayer, ...]:
    """What a traced model's own cache holds, from the cache of files, or by a trace.

    Raises:
        ConfigError: for a model that keeps it elsewhere.
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
