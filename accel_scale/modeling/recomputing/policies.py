"""Names of activation checkpointing policies, and their meaning."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import NOT_REENTRANT, POLICIES, POLICY_CHOICES, SEGMENTS, kind_of, number_in

POLICY_KINDS = (*POLICIES, "every_n")
_SUGGESTIONS = (*POLICIES, "every_2", "every_3", "every_4", "segments_2")


@dataclass(frozen=True)
class CheckpointingPolicy:
    """The activations that the backward pass recomputes.

    Args:
        kind: ``none``; ``full``: every layer keeps only its input; ``every_n``: layers 0, n, 2n, … do so;
            ``selective``: every layer, except that outputs of attention and matrix products are kept; ``attention``,
            ``mlp``: that part of every layer keeps only its input, the rest everything it needs; ``segments``: the
            first of several layers keeps only its input, and they are recomputed together; ``offload``: like full,
            with the layer inputs kept in host memory.
        every_n: Distance between checkpointed layers for ``every_n``; layers per segment for ``segments``, where 1
            means about the square root of their number; otherwise 1.
        in_tiles: True if MLPs and norms run over slices of the rows, each of which is recomputed separately.
    """

    kind: str
    every_n: int = 1
    in_tiles: bool = False

    def __post_init__(self) -> None:
        if self.in_tiles and self.kind in NOT_REENTRANT:
            raise ConfigError(
                f"{self.kind} checkpointing keeps what whole rows need, which tiles are there to drop.",
                place="--long_rows",
                fix="use --checkpointing_policy offload or full.",
            )
        has_number = self.every_n > 1
        fits = has_number == (self.kind == "every_n") or self.kind == SEGMENTS
        if self.kind not in POLICY_KINDS or self.every_n < 1 or not fits:
            raise ConfigError(
                f"kind={self.kind!r} with every_n={self.every_n} is not a checkpointing policy.",
                fix=f"use one of {', '.join(_SUGGESTIONS)}.",
            )

    @classmethod
    def parse(cls, text: str, *, place: str = "--checkpointing_policy") -> CheckpointingPolicy:
        """Parse a policy's name, e.g. ``full``, ``every_2`` or ``segments_3``.

        Raises:
            ConfigError: naming the nearest policy.
        """
        name = str(text).strip().lower().replace("-", "_")
        kind = kind_of(name)
        if kind is not None:
            return cls(kind, 1 if kind == "full" else number_in(name)[1])
        nearest = difflib.get_close_matches(name, _SUGGESTIONS, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(f"{text!r} is not a checkpointing policy.", place=place, fix=f"{hint}use {POLICY_CHOICES}.")

    def __str__(self) -> str:
        name = "every" if self.kind == "every_n" else self.kind
        return f"{name}_{self.every_n}" if self.every_n > 1 else name

    @property
    def label(self) -> str:
        """Label for tables; ends in ``, in tiles`` if `in_tiles`."""
        return f"{self}, in tiles" if self.in_tiles else str(self)
