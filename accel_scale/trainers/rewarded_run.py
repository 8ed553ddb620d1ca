"""Code shared by recipes/grpo.py and rloo.py: settings with rewards, prompts to answer, the model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.flags.rewards import RewardArguments
from accel_scale.planning.search.recipe_choices import PlannedRecipe
from accel_scale.trainers.trainer_run import TrainerRun, load_run_model, prepare_chat
from accel_scale.trainers.trainer_start import load_rows, resolve_trainer_run

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedModel

    from accel_scale.data.loading import LoadedData
    from accel_scale.settings.trl_config import RecipeGRPOConfig, RecipeRLOOConfig
    from accel_scale.trainers.rewards import RewardFunction


@dataclass
class RewardedRun(TrainerRun):
    """A `TrainerRun` with reward functions."""

    rewards: list[RewardFunction] = field(default_factory=list)


def resolve_rewarded_run(parsed: ParsedFlags, plan: PlannedRecipe) -> RewardedRun:
    """Same as `resolve_trainer_run`, plus the functions that ``--rewards`` names.

    Raises:
        ConfigError: as there, and for a reward that cannot be imported or incomplete groups of answers.
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
    """Load prompts and answers to train on, others to evaluate if asked for, and the questions of exact match."""
    from accel_scale.data.default import default_data_paths

    load_rows(run, lambda _, heldout: default_data_paths()[heldout])
    run.data = as_prompts(run.data, place=run.settings.sources.get("dataset_name", "--dataset_mixture"))


def as_prompts(data: LoadedData, *, place: str) -> LoadedData:
    """Convert to ``prompt`` and ``answer``; the answer is the assistant's last turn, or the completion.

    Args:
        data: Rows of ``messages``, or of ``prompt`` and ``completion``.
        place: Where the data was named.

    Raises:
        ConfigError: for rows of plain text, which have no prompt.
    """
    from accel_scale.training.evaluation.exact_match import prompt_and_answer

    if data.format == "text":
        raise ConfigError(
            "rows of plain text have no prompt to answer.",
            place=place,
            fix="name the columns, e.g. --columns prompt=question completion=answer.",
        )

    def convert(row: dict[str, object], index: int) -> dict[str, object]:
        prompt, answer = prompt_and_answer(row, index)
        return {"prompt": prompt, "answer": answer}

    def converted(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
        gone = [name for name in rows.column_names if name not in ("prompt", "answer", "task")]
        return rows.map(convert, with_indices=True, remove_columns=gone)

    return replace(data, train=converted(data.train), test=None if data.test is None else converted(data.test))


def load_generating_model(run: RewardedRun, args: RecipeGRPOConfig | RecipeRLOOConfig) -> tuple[PreTrainedModel, str]:
    """Load the model; returns it and the token that ends an answer, which TRL reads from it when creating the trainer.

    If a frozen reference is kept, TRL loads it by the model's name, with the options set in `args`.
    """
    from accel_scale.modeling.loading import add_stop_token

    options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    stop_token = prepare_chat(run)
    model = load_run_model(run, args)
    add_stop_token(model, run.tokenizer, stop_token)
    if args.use_vllm:
        given = args.generation_kwargs if isinstance(args.generation_kwargs, dict) else {}  # TRL has parsed it
        args.generation_kwargs = {**stops_of(model), **given}
    if run.model_args.model_revision != "main":
        options = {**options, "revision": run.model_args.model_revision}
    if options and args.beta and not run.settings.trains_adapters:
        args.model_init_kwargs = options
    return model, stop_token


def stops_of(model: PreTrainedModel) -> dict[str, list[int]]:
    """vLLM's arguments for the tokens that end an answer: the model's files, which it reads, may list fewer."""
    found = model.generation_config.eos_token_id
    return {"stop_token_ids": [found] if isinstance(found, int) else list(found or ())}
