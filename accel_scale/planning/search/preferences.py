"""Settings of recipes that learn from preferences and rewards: the reference, and the generated answers."""

from __future__ import annotations

from typing import TypedDict

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import GenerationSetup, VllmSetup
from accel_scale.planning.search.recipe_choices import PlannedRecipe
from accel_scale.planning.search.request_words import share, whole
from accel_scale.planning.search.wish import Wish

# TRL's default limit for answers (1.16). It has none for prompts; a prompt of unknown length is taken to be as long.
COMPLETION_TOKENS = PROMPT_TOKENS = 512
_SHARE = "vllm_gpu_memory_utilization"
_OF_GENERATION = ("num_generations", "max_prompt_length", "max_completion_length", "beta", _SHARE)


class Fields(TypedDict, total=False):
    """Fields of a `TrainingSetup` that a request has decided."""

    loss: str
    reference_model: bool
    reference_pass: str
    kl_rows: bool
    generation: GenerationSetup
    vllm: VllmSetup


def preference_fields(wish: Wish, recipe: PlannedRecipe, batch: int, model: ModelFacts, card_bytes: float) -> Fields:
    """The fields of `TrainingSetup` for reference and generation; a generation's rows are left to the search.

    Args:
        wish: What was typed.
        recipe: The recipe that will run.
        batch: Rows per optimizer step over all ranks.
        model: The model that will answer.
        card_bytes: Memory of a card.

    Raises:
        ConfigError: for settings that the recipe does not use, and for groups of answers that do not fill the batch.
    """
    found: Fields = {} if recipe.loss == "chunked" else {"loss": recipe.loss}
    if wish.precompute_ref_log_probs and not recipe.has_reference_model:
        raise _useless("precompute_ref_log_probs", recipe, "--recipe dpo")
    if recipe.has_reference_model:
        keeps = not wish.precompute_ref_log_probs
        found = {**found, "reference_model": keeps, "reference_pass": "within" if keeps else "none"}
        return {**found, "kl_rows": True} if recipe.estimates_kl else found
    if not recipe.generates:
        given = next((name for name in _OF_GENERATION if getattr(wish, name) is not None), None)
        if given is not None:
            raise _useless(given, recipe, "--recipe grpo")
        return found
    if wish.max_length is not None:
        raise ConfigError(
            f"rows of {recipe.script} are a prompt and its answer.",
            place="--max_length",
            fix="use --max_prompt_length and --max_completion_length.",
        )
    group = whole(wish.num_generations or str(recipe.num_generations), "--num_generations")
    if group < 2 or batch % group:
        raise ConfigError(
            f"{batch} answers a step are not groups of {group}."
            if group > 1
            else "one answer has none to compare with.",
            place="--num_generations",
            fix=f"use a number above 1 that divides {batch}, or another --global_batch_size.",
        )
    prompt = whole(wish.max_prompt_length or str(PROMPT_TOKENS), "--max_prompt_length")
    answer = whole(wish.max_completion_length or str(COMPLETION_TOKENS), "--max_completion_length")
    if wish.vllm_gpu_memory_utilization is not None:
        held = share(wish.vllm_gpu_memory_utilization, f"--{_SHARE}") * card_bytes
        found = {**found, "vllm": VllmSetup(held)}
        found["vllm"].refuse_weights(model.num_params)
    return {
        **found,
        **reference_of_rewards(_beta(wish.beta, recipe)),
        "generation": GenerationSetup(0, prompt, answer),
    }


def reference_of_rewards(beta: float) -> Fields:
    """The reference needed by a KL term with a weight above 0; its pass runs when answers are scored."""
    return {"reference_model": beta > 0, "reference_pass": "before" if beta > 0 else "none"}


def _beta(text: str | None, recipe: PlannedRecipe) -> float:
    try:
        value = float(text or recipe.beta)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(f"{text!r} is no weight of a penalty.", place="--beta", fix="write it like 0.04.")
    return value


def _useless(name: str, recipe: PlannedRecipe, instead: str) -> ConfigError:
    return ConfigError(f"{recipe.script} has no use for it.", place=f"--{name}", fix=f"plan with {instead}.")
