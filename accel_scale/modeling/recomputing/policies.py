"""Names of activation checkpointing policies, and what each of them says."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import NOT_REENTRANT, POLICIES, POLICY_CHOICES, SEGMENTS, kind_of, number_in

POLICY_KINDS = (*POLICIES, "every_n")
_SUGGESTIONS = (*POLICIES, "every_2", "every_3", "every_4", "segments_2")


@dataclass(frozen=True)
class CheckpointingPolicy:
    """What the backward pass recomputes.

    Args:
        kind: ``none``; ``full``: every layer keeps its input only; ``every_n``: layers 0, n, 2n, … do so;
            ``selective``: every layer, except that attention and matrix product outputs are kept;
            ``attention``, ``mlp``: that part of every layer keeps its input only, the rest all it needs;
            ``segments``: the first of several layers keeps its input only, and they are recomputed together;
            ``offload``: like full, with the layer inputs kept in host memory.
        every_n: Distance between checkpointed layers of ``every_n``; layers of a segment, where 1 stands for about the
            square root of their number; else 1.
        in_tiles: Whether MLPs and norms run over slices of the rows, each of which is recomputed by itself.
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
        """The policy called `text`, e.g. ``full``, ``every_2`` or ``segments_3``.

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
        """For tables: with ``, in tiles`` where that is so."""
        return f"{self}, in tiles" if self.in_tiles else str(self)
