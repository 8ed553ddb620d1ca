"""Activation checkpointing policies by name: which there are, and what the numbers in their names say."""

from __future__ import annotations

import math
import re

SUBLAYERS = ("attention", "mlp")  # policies of one part of each layer
SEGMENTS = "segments"  # several layers are recomputed together
POLICIES = ("none", "full", "selective", *SUBLAYERS, SEGMENTS, "offload")
POLICY_CHOICES = "none, full, every_2 (or any every_n), selective, attention, mlp, segments (or segments_n) or offload"
# What works with non-reentrant checkpointing alone.
NOT_REENTRANT = ("selective", *SUBLAYERS, SEGMENTS)
_NUMBERED = re.compile(rf"(every|{SEGMENTS})_([0-9]+)")


def number_in(policy: str) -> tuple[str, int]:
    """``every`` or ``segments`` and the number of layers in the name of `policy`; other policies and 1."""
    match = _NUMBERED.fullmatch(policy)
    return (match.group(1), int(match.group(2))) if match else (policy, 1)


def kind_of(policy: str) -> str | None:
    """The policy without its number: ``every_n``, or one of `POLICIES`; None if it is no policy."""
    name, number = number_in(policy)
    if number < 1:
        return None
    if name != policy and number == 1:
        return "full"
    return "every_n" if name == "every" and name != policy else name if name in POLICIES else None


def layers_at_once(policy: str, num_layers: int) -> int:
    """Layers that are recomputed together: the number in the name of ``segments_n``, about √`num_layers` for
    ``segments``, else 1."""
    name, number = number_in(policy)
    if name != SEGMENTS:
        return 1
    return number if policy != SEGMENTS else max(1, round(math.sqrt(num_layers)))
