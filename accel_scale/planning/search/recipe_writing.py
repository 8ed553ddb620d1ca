"""Writes a plan as flags of a recipe, in YAML; flags that the recipe lacks are left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.plan import Candidate, Request
from accel_scale.planning.search.recipe_choices import PlannedRecipe, RecipeChoices

_STEPS = 1000  # if the recipe does not count epochs


def recipe_lines(request: Request, candidate: Candidate, choices: RecipeChoices) -> list[str]:
    """Lines of a YAML file, with a comment that names the recipe for `planned_script`.

    Raises:
        ConfigError: if columns are given and the recipe has no flag for them.
    """
    setup, recipe = candidate.setup, request.recipe
    if choices.columns and "columns" not in recipe.flags:
        raise ConfigError(f"{recipe.script} has no --columns.", place="--columns", fix="remove it.")
    written = [
        f"# Flags of {recipe.script}; learning rate and length of the run are usual ones, not part of the plan.",
        *_of_the_data(recipe, setup, choices),
        "",
        *_of_the_method(setup, recipe),
        *(f"{name}: {value}" for name, value in choices.settings),
        *_of_the_length(setup, recipe, choices.tokens),
        "",
        *_of_the_batch(request, setup, choices),
    ]
    if "attention" in request.fixed:
        written.append(f"attn_implementation: {setup.attention}")
    written += ["", "save_strategy: epoch", "logging_steps: 10", "seed: 42"]
    return [*(line for line in written if _has(recipe, line)), ""]


def planned_script(text: str) -> str | None:
    """The recipe that a file written from `recipe_lines` is for; None if it names none."""
    match = re.search(r"^# Flags of (.+?); ", text, re.MULTILINE)
    return match and match[1]


def _has(recipe: PlannedRecipe, line: str) -> bool:
    return not line or line.startswith("#") or line.partition(":")[0] in recipe.flags


def _of_the_data(recipe: PlannedRecipe, setup: TrainingSetup, choices: RecipeChoices) -> list[str]:
    slug = re.sub(r"[^a-z0-9.]+", "-", Path(choices.model).name.lower()).strip("-")
    lines = [f"model_name_or_path: {json.dumps(choices.model)}"]
    data = choices.dataset or recipe.example_data
    if data is not None:
        note = "" if choices.dataset else "  # an example: put your hub id, file or folder here"
        lines.append(f"{recipe.data_flag}: {_flow([data]) if recipe.data_is_list else json.dumps(data)}{note}")
    if choices.columns:
        lines.append(f"columns: {_flow(choices.columns)}")
    lines += recipe.example_lines if not (choices.dataset or choices.columns) else ()
    suffix = setup.method if "num_train_epochs" in recipe.flags else Path(recipe.script).stem
    return [*lines, f"output_dir: {json.dumps(f'outputs/{slug}-{suffix}')}"]


def _of_the_method(setup: TrainingSetup, recipe: PlannedRecipe) -> list[str]:
    lines = [f"method: {setup.method}", f"precision: {setup.precision}"]
    if "precision" not in recipe.flags and setup.precision in ("bf16", "fp16"):
        lines.append(f"{setup.precision}: true")
    if setup.quantises_base:
        lines += ["bnb_4bit_quant_type: nf4", f"use_bnb_nested_quant: {str(setup.double_quantisation).lower()}"]
    if setup.trains_adapters:
        targets = setup.lora.targets
        one = len(targets) == 1 and not recipe.data_is_list
        lines += [f"lora_r: {setup.lora.rank}", f"lora_alpha: {2 * setup.lora.rank}"]
        lines += [f"lora_dropout: {setup.lora.dropout}"]
        lines += [f"lora_target_modules: {targets[0] if one else _flow(targets)}"]
        lines += ["use_dora: true"] * setup.lora.dora
    lines.append(f"optim: {setup.optimizer}")
    if setup.method in recipe.learning_rates:
        lines.append(f"learning_rate: {recipe.learning_rates[setup.method]:.1e}")
    return [*lines, "lr_scheduler_type: cosine", "warmup_ratio: 0.03"]


def _of_the_length(setup: TrainingSetup, recipe: PlannedRecipe, tokens: float | None) -> list[str]:
    if tokens is None:
        return ["num_train_epochs: 1" if "num_train_epochs" in recipe.flags else f"max_steps: {_STEPS}"]
    if "max_tokens" in recipe.flags:
        return [f"max_tokens: {json.dumps(str(int(tokens)))}"]
    filled = (setup.mean_length or setup.sequence_length) / setup.sequence_length
    return [f"max_steps: {max(1, math.ceil(tokens / (setup.tokens_per_step * filled)))}"]


def _of_the_batch(request: Request, setup: TrainingSetup, choices: RecipeChoices) -> list[str]:
    recipe, parallel = request.recipe, setup.parallel
    rows = recipe.rows_per_example
    lines = [f"max_length: {choices.max_length or setup.sequence_length}", f"packing: {str(setup.packing).lower()}"]
    if setup.generation is not None:
        lines += [f"max_completion_length: {setup.generation.completion_length}"]
    lines += ["precompute_ref_log_probs: true"] * (recipe.has_reference_model and setup.reference_pass == "none")
    lines += [f"per_device_train_batch_size: {setup.micro_batch_size // rows}"]
    lines += [f"global_batch_size: {request.global_batch_size // rows}  # accumulation follows: {setup.accumulation}"]
    if "global_batch_size" not in recipe.flags:
        lines.append(f"gradient_accumulation_steps: {setup.accumulation}")
    lines += ["sync_each_batch: true  # FSDP2 keeps no whole gradients between micro-batches"] * setup.sync_each_batch
    lines += ["long_rows: true  # MLPs and norms in tiles"] * setup.long_rows
    lines += [f"checkpointing_policy: {setup.checkpointing}"]
    if "checkpointing_policy" not in recipe.flags:
        lines.append(f"gradient_checkpointing: {str(setup.checkpointing == 'full').lower()}")
    # Degrees that the launch file cannot hold: stages always, the others unless FSDP2 divides them.
    if not parallel.kind.is_fsdp2 or not recipe.divides_model:
        lines += [f"tp_size: {parallel.tensor_parallel}"] * (parallel.tensor_parallel > 1)
        note = "" if recipe.divides_model else "  # GPUs that share each row"
        lines += [f"sp_size: {parallel.sequence_parallel}{note}"] * (parallel.sequence_parallel > 1)
    if parallel.pipeline_parallel > 1:
        lines += [f"pp_size: {parallel.pipeline_parallel}", f"pp_schedule: {parallel.pipeline_schedule}"]
    return lines


def _flow(items: Iterable[str]) -> str:
    return json.dumps(list(items), ensure_ascii=False)
