"""Names of activation checkpointing policies, and the numbers in them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from accel_scale.errors import ConfigError

SUBLAYERS = ("attention", "mlp")  # policies for one part of each layer
SEGMENTS = "segments"  # several layers are recomputed together
POLICIES = ("none", "full", "selective", *SUBLAYERS, SEGMENTS, "offload")
POLICY_CHOICES = "none, full, every_2 (or any every_n), selective, attention, mlp, segments (or segments_n) or offload"
# Policies that work only with non-reentrant checkpointing.
NOT_REENTRANT = ("selective", *SUBLAYERS, SEGMENTS)
_NUMBERED = re.compile(rf"(every|{SEGMENTS})_([0-9]+)")


def number_in(policy: str) -> tuple[str, int]:
    """``every`` or ``segments`` and the number of layers in the name of `policy`; other policies unchanged, with 1."""
    match = _NUMBERED.fullmatch(policy)
    return (match.group(1), int(match.group(2))) if match else (policy, 1)


def kind_of(policy: str) -> str | None:
    """The policy without its number: ``every_n``, or one of `POLICIES`; None if it is not a policy."""
    name, number = number_in(policy)
    if number < 1:
        return None
    if name != policy and number == 1:
        return "full"
    return "every_n" if name == "every" and name != policy else name if name in POLICIES else None


def layers_at_once(policy: str, num_layers: int) -> int:
    """Number of layers recomputed together: n for ``segments_n``, about √`num_layers` for ``segments``, 1 for the
    rest."""
    name, number = number_in(policy)
    if name != SEGMENTS:
        return 1
    return number if policy != SEGMENTS else max(1, round(math.sqrt(num_layers)))


def refuse_compiled_segments(given: Mapping[str, object], place: Callable[[str], str]) -> None:
    """Refuse to compile layers under ``segments``, which span layers by hooks that a compiled layer does not run.

    Args:
        given: Settings by flag name.
        place: Returns where a setting was made.

    Raises:
        ConfigError: if both are requested.
    """
    policy = given.get("checkpointing_policy")
    if given.get("torch_compile") and isinstance(policy, str) and kind_of(policy) == SEGMENTS:
        raise ConfigError(
            f"compiled layers are not recomputed in {policy}.",
            place=place("torch_compile"),
            fix="leave --torch_compile out, or use --checkpointing_policy full.",
        )


def refuse_too_few_layers(policy: str, num_layers: int, model: str, *, place: str) -> None:
    """Refuse a policy that groups more layers than the model has.

    Raises:
        ConfigError: with the largest number that works.
    """
    name, number = number_in(policy)
    if number > num_layers:
        raise ConfigError(
            f"{policy} asks for more layers than the {num_layers} that {model} has.",
            place=place,
            fix=f"use {name}_{num_layers} at most, or none.",
        )
