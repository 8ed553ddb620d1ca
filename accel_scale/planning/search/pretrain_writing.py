"""A plan as flags of recipes/pretrain.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.plan import Candidate, Request
from accel_scale.planning.search.recipe_choices import RecipeChoices

# Usual ones to go on training a model with, not part of a plan.
_LEARNING_RATES = {"full": 3e-5, "lora": 2e-4}
_STEPS = 1000
# Runs as it is; a user replaces it.
EXAMPLE_DATA = "roneneldan/TinyStories"


def pretrain_lines(request: Request, candidate: Candidate, recipe: RecipeChoices) -> list[str]:
    """Lines of a YAML file.

    Raises:
        ConfigError: for columns, of which text has one only.
    """
    if recipe.columns:
        raise ConfigError(
            "recipes/pretrain.py reads text, from one column.",
            place="--columns",
            fix="set text_column in recipe.yaml.",
        )
    setup = candidate.setup
    slug = re.sub(r"[^a-z0-9.]+", "-", Path(recipe.model).name.lower()).strip("-")
    data = f"data: [{json.dumps(recipe.dataset or EXAMPLE_DATA)}]"
    data += "" if recipe.dataset else "  # an example: put your hub id, files or folder here"
    lines = ["# Flags of recipes/pretrain.py; learning rate and number of steps are usual ones, not part of the plan."]
    lines += [f"model_name_or_path: {json.dumps(recipe.model)}", data]
    lines += [f"output_dir: {json.dumps(f'outputs/{slug}-pretrain')}", ""]
    lines += [f"method: {setup.method}", f"precision: {setup.precision}"]
    if setup.method == "lora":
        lines += [f"lora_r: {setup.lora.rank}", f"lora_alpha: {2 * setup.lora.rank}"]
        lines += [
            f"lora_dropout: {setup.lora.dropout}",
            f"lora_target_modules: {json.dumps(list(setup.lora.targets))}",
        ]
    lines += [f"optim: {setup.optimizer}", f"learning_rate: {_LEARNING_RATES[setup.method]:.1e}"]
    length = f"max_steps: {_STEPS}" if recipe.tokens is None else f"max_tokens: {json.dumps(str(int(recipe.tokens)))}"
    lines += ["lr_scheduler_type: cosine", "warmup_ratio: 0.03", length, ""]
    lines += [f"max_length: {recipe.max_length or setup.sequence_length}"]
    lines += [f"per_device_train_batch_size: {setup.micro_batch_size}"]
    lines += [f"global_batch_size: {request.global_batch_size}  # accumulation follows: {setup.accumulation}"]
    lines += ["sync_each_batch: true  # FSDP2 keeps no whole gradients between micro-batches"] * setup.sync_each_batch
    lines += [f"checkpointing_policy: {setup.checkpointing}", *_sharing(setup)]
    if "attention" in request.fixed:
        lines.append(f"attn_implementation: {setup.attention}")
    return [*lines, "", "logging_steps: 10", "seed: 42", ""]


def _sharing(setup: TrainingSetup) -> list[str]:
    """Degrees that the launch file has no place for: stages always, the others unless FSDP2 is launched."""
    parallel = setup.parallel
    lines = []
    if not parallel.kind.is_fsdp2:
        sizes = {"tp_size": parallel.tensor_parallel, "sp_size": parallel.sequence_parallel}
        lines += [f"{name}: {size}" for name, size in sizes.items() if size > 1]
    if parallel.pipeline_parallel > 1:
        lines += [f"pp_size: {parallel.pipeline_parallel}", f"pp_schedule: {parallel.pipeline_schedule}"]
    return lines
