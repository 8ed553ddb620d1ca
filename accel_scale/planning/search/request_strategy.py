"""Parses requested strategies: names, degrees of model parallelism, and whether a recipe can run them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.facts import hardware
from accel_scale.facts.names import METHODS, PIPELINE_SCHEDULES
from accel_scale.facts.strategies import LAUNCH_FILE_LABELS
from accel_scale.planning.cost.strategies import choices
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.search.model_parallel import Degrees, labels
from accel_scale.planning.search.recipe_choices import PlannedRecipe
from accel_scale.planning.search.request_words import one_of, whole


def methods_of(method: str, recipe: PlannedRecipe) -> tuple[str, ...]:
    """Training methods to choose from: the requested one, or all that the recipe has.

    Raises:
        ConfigError: for a method that the recipe does not have.
    """
    known = recipe.methods
    if method == "auto":
        return known
    if method in METHODS and method not in known:
        raise ConfigError(
            f"{recipe.script} does not train by {method}.", place="--method", fix=f"use {' or '.join(known)}."
        )
    return (one_of(method, (*known, "auto"), "--method"),)


def degrees_of(given: Mapping[str, str | None], recipe: PlannedRecipe, num_gpus: int) -> Degrees:
    """The requested degrees of model parallelism.

    Args:
        given: Sizes by ``tp``, ``pp`` and ``sp``.

    Raises:
        ConfigError: if the recipe does not support one, or they do not divide the number of GPUs.
    """
    sizes = {name: whole(text, f"--{name}_size") for name, text in given.items() if text is not None}
    unknown = next((name for name in sizes if name not in recipe.shared_by), None)
    if unknown is not None:
        raise ConfigError(
            f"{recipe.script} does not share its model between ranks.",
            place=f"--{unknown}_size",
            fix="add --recipe pretrain, whose recipe does.",
        )
    if num_gpus % math.prod(sizes.values()):
        asked = " × ".join(f"--{name}_size {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{num_gpus} GPUs cannot be divided by {asked}.",
            place=f"--{next(iter(sizes))}_size",
            fix=f"use a multiple of {math.prod(sizes.values())} GPUs.",
        )
    return Degrees(sizes.get("tp"), sizes.get("pp"), sizes.get("sp"))


def schedule_of(schedule: str | None, pp_size: str | None) -> str:
    """The schedule of a pipeline: the requested one, or 1F1B.

    Raises:
        ConfigError: for a schedule that does not exist, or one without a pipeline.
    """
    if schedule is None:
        return PIPELINE_SCHEDULES[0]
    if pp_size is None or pp_size.strip() == "1":
        raise ConfigError("does nothing without a pipeline.", place="--pp_schedule", fix="add --pp_size.")
    return one_of(schedule, PIPELINE_SCHEDULES, "--pp_schedule")


def strategy_label(text: str, machine: hardware.Machine, model: ModelFacts, recipe: PlannedRecipe) -> str:
    """The label that ``--strategy`` means, written in any case and punctuation or as the name of a launch file.

    Raises:
        ConfigError: if there is no such strategy for these GPUs, or the recipe cannot run it.
    """
    sizes = machine.num_gpus, machine.gpus_per_node
    usual, shared = [choice.label for choice in choices(*sizes)], labels(model, *sizes)
    stem = Path(text).name.removesuffix(".yaml")
    wanted = _letters(LAUNCH_FILE_LABELS.get(stem, stem.removesuffix("_multinode")))
    by_letters = {_letters(label): label for label in (*usual, *shared)}
    if by_letters.get(wanted) in set(shared) - set(labels(model, *sizes, recipe)):
        raise ConfigError(
            f"{recipe.script} does not share its model between ranks, as {by_letters[wanted]} does.",
            place="--strategy",
            fix="add --recipe pretrain, whose recipe does.",
        )
    if wanted not in by_letters:
        near = difflib.get_close_matches(wanted, by_letters, n=1, cutoff=0.5)
        hint = f"did you mean {by_letters[near[0]]!r}? " if near else ""
        raise ConfigError(
            f"{text!r} is not a strategy for {machine.num_gpus} GPU{'s' * (machine.num_gpus > 1)}.",
            place="--strategy",
            fix=f"{hint}use one of {', '.join(usual)}.",
        )
    return by_letters[wanted]


def _letters(text: str) -> str:
    return "".join(c for c in text.lower().replace("×", "x") if c.isalnum())
