"""Mixtures: several sources, sampled row by row in proportion to their weights, or all of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from accel_scale.data.layout import Layout
from accel_scale.data.sources import looks_local
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Rows = TypeVar("Rows", Dataset, IterableDataset)


@dataclass(frozen=True)
class MixtureItem:
    """One source; `weight` > 0 is its share of the rows drawn, before all are scaled to sum to 1.

    None means all of its rows.
    """

    name: str
    weight: float | None
    config: str | None = None


def parse_weight(name: str, text: str, *, place: str, fix: str) -> float:
    """Parse `text`, the share of the source `name`.

    Raises:
        ConfigError: if it is not a finite number above 0.
    """
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(f"the weight {text!r} of {name} is not a number above 0.", place=place, fix=fix)
    return weight


def parse_mixture(items: Sequence[str]) -> list[MixtureItem]:
    """``["a.jsonl=0.7", "openai/gsm8k:main=0.3"]`` → items; a hub id may carry its configuration after a colon.

    Raises:
        ConfigError: weights for only some sources, one that is not a finite number above 0, or a source named twice.
    """
    parsed: list[MixtureItem] = []
    weighed = any(_has_weight(item) for item in items)
    for item in items:
        name, equals, text = item.rpartition("=") if weighed else (item, "", "")
        if weighed and not (equals and name):
            raise ConfigError(
                f"{item!r} has no weight.", place="--dataset_mixture", fix=f"write its share of the rows, {item}=0.5."
            )
        fix = f"write a share such as {name}=0.5, or leave {name} out."
        weight = parse_weight(name, text, place="--dataset_mixture", fix=fix) if weighed else None
        config = ""
        if not looks_local(name):
            name, _, config = name.partition(":")
        if any((name, config or None) == (other.name, other.config) for other in parsed):
            raise ConfigError(f"{name} is named twice.", place="--dataset_mixture", fix="give it one weight.")
        parsed.append(MixtureItem(name, weight, config or None))
    return parsed


def _has_weight(item: str) -> bool:
    _, equals, text = item.rpartition("=")
    return bool(equals) and "/" not in text and not looks_local(text)


def shares(items: Sequence[MixtureItem]) -> list[float] | None:
    """Weights scaled to sum to 1; None if there are none."""
    weights = [item.weight for item in items if item.weight is not None]
    return [weight / sum(weights) for weight in weights] or None


def common_layouts(names: Sequence[str], layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts whose rows have the same columns: as they are if they agree, else all as ``messages``.

    Raises:
        ConfigError: plain text mixed with anything else, which has no turns to become messages.
    """
    extras = tuple(role for role in ("answer", "tools") if any(role in layout.extras for layout in layouts))
    rich = any(layout.rich for layout in layouts)
    aligned = [replace(layout, extras=extras, rich=rich) for layout in layouts]
    if len({(layout.target, layout.conversational) for layout in aligned}) == 1:
        return aligned
    for name, layout in zip(names, layouts, strict=True):
        if layout.target in ("preference", "labelled"):
            raise ConfigError(
                f"{names[0]} and {name} differ: prompts and answers are turns in one and text in the other.",
                place="--dataset_mixture",
                fix="write both the same way.",
            )
        if layout.target == "text":
            raise ConfigError(
                f"{name} is plain text, which has no turns, and cannot be mixed with questions and answers.",
                place="--dataset_mixture",
                fix="mix text with text only, or train on it in a run of its own.",
            )
    return [layout.as_messages() for layout in aligned]


def mix(datasets: Sequence[Rows], probabilities: Sequence[float] | None, *, seed: int) -> Rows:
    """Draw rows from `datasets` with `probabilities`; the same on every rank for the same `seed`.

    Without probabilities, the data sets are concatenated in full.

    Each data set is shuffled first, so the rows drawn are a random part of it. The mixture ends when one of its
    sources runs out: no row is repeated within an epoch, and the shares hold to the end. A source that is small for
    its weight therefore shortens the epoch; give it a smaller one to see more of the others.
    """
    from datasets import Dataset, concatenate_datasets, interleave_datasets

    if len(datasets) == 1:
        return datasets[0]
    if probabilities is None:
        return concatenate_datasets(list(datasets))
    shuffled = [
        rows.shuffle(seed=seed + index) if isinstance(rows, Dataset) else rows for index, rows in enumerate(datasets)
    ]
    return interleave_datasets(
        shuffled, probabilities=list(probabilities), seed=seed, stopping_strategy="first_exhausted"
    )
