"""What recipes/grpo.py and rloo.py share: settings with what is rewarded, prompts to answer, the model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_scale.flags.parsing import ParsedFlags
from accel_scale.flags.rewards import RewardArguments
from accel_scale.planning.search.recipe_choices import PlannedRecipe
from accel_scale.trainers.trainer_run import TrainerRun, load_run_model, prepare_chat
from accel_scale.trainers.trainer_start import load_rows, resolve_trainer_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from accel_scale.settings.trl_config import RecipeGRPOConfig, RecipeRLOOConfig
    from accel_scale.trainers.rewards import RewardFunction


@dataclass
class RewardedRun(TrainerRun):
    """As every run with a trainer, with what it rewards."""

    rewards: list[RewardFunction] = field(default_factory=list)


def resolve_rewarded_run(parsed: ParsedFlags, plan: PlannedRecipe) -> RewardedRun:
    """As `resolve_trainer_run`, with the functions that ``--rewards`` names.

    Raises:
        ConfigError: as there, for a reward that cannot be imported, and groups of answers that are not whole.
    """
    from accel_scale.data.default import DEFAULT_REWARDING
    from accel_scale.starting.early_checks import refuse_groups
    from accel_scale.trainers.rewards import reward_functions

    refuse_groups(parsed, int(os.environ.get("WORLD_SIZE", "1")))
    run = resolve_trainer_run(parsed, plan, preset=DEFAULT_REWARDING)
    settings = run.settings
    rewards = reward_functions(settings.build(RewardArguments).rewards, weights=settings.values.get("reward_weights"))
    return RewardedRun(
        settings=settings, start=run.start, script=run.script, model_args=run.model_args, rewards=rewards
    )


def load_prompts(run: RewardedRun) -> None:
    """Prompts and answers to train on, others to evaluate where asked for, and the questions of exact match."""
    from accel_scale.data.default import default_data_paths
    from accel_scale.trainers.prompts import as_prompts

    load_rows(run, lambda heldout: default_data_paths()[heldout])
    run.data = as_prompts(run.data, place=run.settings.sources.get("dataset_name", "--dataset_mixture"))
    run.plan = run.plan and run.plan.for_data(run.data.train, run.tokenizer)


def load_generating_model(run: RewardedRun, args: RecipeGRPOConfig | RecipeRLOOConfig) -> tuple[PreTrainedModel, str]:
    """The model, and the token that ends an answer, which TRL looks up in it when it makes the trainer.

    Where a frozen reference is kept, TRL loads that by the model's name: `args` say how.
    """
    from accel_scale.modeling.loading import add_stop_token

    options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    stop_token = prepare_chat(run)
    model = load_run_model(run, args)
    add_stop_token(model, run.tokenizer, stop_token)
    if run.model_args.model_revision != "main":
        options = {**options, "revision": run.model_args.model_revision}
    if options and args.beta and not run.settings.trains_adapters:
        args.model_init_kwargs = options
    return model, stop_token
