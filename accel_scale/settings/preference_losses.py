"""The losses of TRL's `DPOTrainer` and what they need, checked before anything is loaded."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags

# TRL's names (1.16), which TRL looks up only in the first step; tests/recipes/test_dpo_losses.py compares them with
# its own.
DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
# Losses that allow a divergence other than the reverse KL.
_OF_ANY_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SORTED = {"aot", "aot_unpaired"}


def refuse_losses(parsed: ParsedFlags) -> None:
    """Refuse losses that TRL does not have, or that are incompatible with other flags.

    Raises:
        ConfigError: for the first one.
    """
    given = parsed.explicit
    value = given.get("loss_type") or ["sigmoid"]
    losses = [value] if isinstance(value, str) else [str(name) for name in value]
    place = parsed.place("loss_type")
    for name in losses:
        if name not in DPO_LOSSES:
            near = difflib.get_close_matches(name, DPO_LOSSES, n=1)
            fix = f"did you mean {near[0]}?" if near else f"use some of {', '.join(DPO_LOSSES)}."
            raise ConfigError(f"{name!r} is no loss of TRL's.", place=place, fix=fix)
    weights, smoothing = given.get("loss_weights"), float(given.get("label_smoothing") or 0.0)
    if weights is not None and len(weights) != len(losses):
        raise ConfigError(
            f"{len(weights)} weights do not go with {len(losses)} losses ({', '.join(losses)}).",
            place=parsed.place("loss_weights"),
            fix="give one weight for each.",
        )
    if "exo_pair" in losses and smoothing == 0:
        raise ConfigError(
            "exo_pair takes the logarithm of the label smoothing.", place=place, fix="add --label_smoothing 1e-3."
        )
    if "robust" in losses and not 0 <= smoothing < 0.5:
        raise ConfigError(
            f"robust divides by 1 - 2 × {smoothing:g}.",
            place=parsed.place("label_smoothing"),
            fix="use 0 or more and less than 0.5.",
        )
    if given.get("f_divergence_type", "reverse_kl") != "reverse_kl" and not set(losses) <= _OF_ANY_DIVERGENCE:
        raise ConfigError(
            f"{', '.join(sorted(set(losses) - _OF_ANY_DIVERGENCE))} goes with the reverse KL alone.",
            place=parsed.place("f_divergence_type"),
            fix="remove it, or use another --loss_type.",
        )
    if given.get("use_weighting") and _SORTED & set(losses):
        raise ConfigError(
            f"{', '.join(sorted(_SORTED & set(losses)))} sorts the pairs, whose weights would no longer be theirs.",
            place=parsed.place("use_weighting"),
            fix="remove it, or use another --loss_type.",
        )
