"""Another stack's defaults as fields of a plan."""

from __future__ import annotations

from accel_scale.errors import ConfigError
from accel_scale.facts.stacks import OURS, STACKS, Stack
from accel_scale.planning.search.recipe_choices import SFT_PLAN, PlannedRecipe
from accel_scale.planning.search.request_words import one_of


def stack_named(text: str, recipe: PlannedRecipe) -> Stack:
    """The stack named by ``--stack``.

    Raises:
        ConfigError: for an unknown stack, and for any stack but ours if the recipe is not fine-tuning.
    """
    stack = STACKS[one_of(text, STACKS, "--stack")]
    if text != OURS and recipe != SFT_PLAN:
        raise ConfigError("other stacks are planned for fine-tuning.", place="--stack", fix="remove --recipe.")
    return stack


def stack_fields(name: str, method: str) -> dict[str, str | bool]:
    """Fields of `TrainingSetup` that the stack decides if the user has not."""
    stack = STACKS[name]
    found: dict[str, str | bool] = {}
    if stack.loss != "chunked":
        found["loss"] = stack.loss
    given = {
        "checkpointing": stack.checkpointing,
        "optimizer": stack.optimizer,
        "weight_dtype": stack.trained.get(method),
        "frozen_dtype": stack.frozen.get(method),
    }
    found |= {field: value for field, value in given.items() if value is not None}
    if stack.expandable_segments:
        found["expandable_segments"] = True
    return found if stack.quantises_whole else {**found, "quantises_whole": False}
