"""A plan as files that run it: the launch file, DeepSpeed's own where it needs one, and the recipe's flags."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.memory import MemoryEstimate
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.launch_writing import DEEPSPEED, MARK, about, deepspeed_json, launch_yaml, num_nodes
from accel_scale.planning.search.model_parallel import SHARED_BY
from accel_scale.planning.search.pretrain_writing import pretrain_lines
from accel_scale.planning.search.recipe_choices import RecipeChoices
from accel_scale.planning.search.search import Candidate, Request
from accel_scale.units import format_bytes

__all__ = ["RecipeChoices", "WrittenPlan", "plan_files", "write_files"]

LAUNCH, RECIPE = "launch.yaml", "recipe.yaml"
# Runs as it is with any chat or base model; a user replaces it.
EXAMPLE_DATASET = "yahma/alpaca-cleaned"
_GIB = 2**30

# The usual starting points: Llama 2's and Tulu's fine-tuning, and QLoRA's paper (Dettmers et al. 2023, table 9).
_LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}


@dataclass(frozen=True)
class WrittenPlan:
    """Files of a plan and how to use them.

    Attributes:
        files: Path → contents.
        command: Starts the run; on every node, where there are several.
        rehearsal: Tries it small on CPU processes first.
    """

    files: Mapping[Path, str]
    command: str
    rehearsal: str


def plan_files(request: Request, candidate: Candidate, recipe: RecipeChoices, folder: Path) -> WrittenPlan:
    """The files of `candidate`, as they will be in `folder`. Writes nothing.

    Raises:
        ConfigError: for a plan that the recipe cannot run.
    """
    setup = candidate.setup
    shared = {name for name, size in zip(("tp", "pp", "sp"), setup.parallel.degrees, strict=True) if size > 1}
    if not shared <= set(SHARED_BY[request.recipe]):
        raise ConfigError(
            f"recipes/{request.recipe}.py does not share its model between ranks, as {candidate.choice.label} does.",
            place="--write",
            fix="plan with --recipe pretrain.",
        )
    launch_path, recipe_path = folder / LAUNCH, folder / RECIPE
    script = f"recipes/{request.recipe}.py"
    command = _command(setup, launch_path, recipe_path, script)
    lines = pretrain_lines(request, candidate, recipe) if request.recipe == "pretrain" else None
    files = {launch_path: "", recipe_path: _recipe_yaml(request, candidate, recipe, lines)}
    if "nvme" in (setup.parallel.offload_params, setup.parallel.offload_optimizer):
        files[folder / DEEPSPEED] = deepspeed_json(request.model, setup.parallel, folder)
    files[launch_path] = launch_yaml(candidate, command, folder)
    words = ["accel-scale", "rehearse", "--config_file", str(launch_path), script]
    return WrittenPlan(files, command, shlex.join([*words, "--config_file", str(recipe_path)]))


def write_files(written: WrittenPlan) -> None:
    """Write them; files of an earlier plan are replaced, others are not.

    Raises:
        ConfigError: if a file is somebody else's or cannot be written.
    """
    for path in written.files:
        if path.exists() and not _is_ours(path):
            raise ConfigError("exists and is not a plan's.", place=str(path), fix="choose another folder.")
    for path, text in written.files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}.", place=str(path), fix="name another.") from None


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return MARK in text or (path.name == DEEPSPEED and '"zero_optimization"' in text)


def _command(setup: TrainingSetup, launch: Path, recipe: Path, script: str) -> str:
    """The command line; `$SLURM_NODEID` and `$NODE_0` stay for the shell of each node."""
    nodes = " --machine_rank $SLURM_NODEID --main_process_ip $NODE_0" if num_nodes(setup.parallel) > 1 else ""
    files = shlex.quote(str(launch)), shlex.quote(str(recipe))
    return f"accelerate launch --config_file {files[0]}{nodes} {script} --config_file {files[1]}"


def _recipe_yaml(
    request: Request, candidate: Candidate, recipe: RecipeChoices, lines_of_recipe: list[str] | None
) -> str:
    head = [f"# {about(candidate)}", f"# {_fit(request, candidate.memory)}", "#"]
    return "\n".join([*head, *(lines_of_recipe or _sft_lines(request, candidate, recipe))])


def _sft_lines(request: Request, candidate: Candidate, recipe: RecipeChoices) -> list[str]:
    setup = candidate.setup
    data = "" if recipe.dataset else "  # an example: put your hub id, file or folder here"
    slug = re.sub(r"[^a-z0-9.]+", "-", Path(recipe.model).name.lower()).strip("-")
    lines = ["# Flags of recipes/sft.py; the learning rate and the epochs are usual ones, not part of the plan."]
    lines += [f"model_name_or_path: {json.dumps(recipe.model)}"]
    lines += [f"dataset_name: {json.dumps(recipe.dataset or EXAMPLE_DATASET)}{data}"]
    if recipe.columns:
        lines.append(f"columns: {_flow(recipe.columns)}")
    lines += [f"output_dir: {json.dumps(f'outputs/{slug}-{setup.method}')}", ""]
    lines += [f"method: {setup.method}", f"precision: {setup.precision}"]
    if setup.method == "qlora":
        lines += ["bnb_4bit_quant_type: nf4", f"use_bnb_nested_quant: {str(setup.double_quantisation).lower()}"]
    if setup.method != "full":
        targets = setup.lora.targets
        lines += [f"lora_r: {setup.lora.rank}", f"lora_alpha: {2 * setup.lora.rank}"]
        lines += [f"lora_dropout: {setup.lora.dropout}"]
        lines += [f"lora_target_modules: {targets[0] if len(targets) == 1 else _flow(targets)}"]
        lines += ["use_dora: true"] * setup.lora.dora
    lines += ["", f"optim: {setup.optimizer}", f"learning_rate: {_LEARNING_RATES[setup.method]:.1e}"]
    lines += ["lr_scheduler_type: cosine", "warmup_ratio: 0.03", _duration(setup, recipe.tokens), ""]
    lines += [f"max_length: {recipe.max_length or setup.sequence_length}", f"packing: {str(setup.packing).lower()}"]
    lines += [f"per_device_train_batch_size: {setup.micro_batch_size}"]
    lines += [f"global_batch_size: {request.global_batch_size}  # accumulation follows: {setup.accumulation}"]
    lines += ["sync_each_batch: true  # FSDP2 keeps no whole gradients between micro-batches"] * setup.sync_each_batch
    lines += [f"checkpointing_policy: {setup.checkpointing}"]
    if setup.parallel.sequence_parallel > 1:
        lines += [f"sp_size: {setup.parallel.sequence_parallel}  # GPUs that share each row"]
    if "attention" in request.fixed:
        lines.append(f"attn_implementation: {setup.attention}")
    return [*lines, "", "save_strategy: epoch", "logging_steps: 10", "seed: 42", ""]


def _duration(setup: TrainingSetup, tokens: float | None) -> str:
    if tokens is None:
        return "num_train_epochs: 1"
    filled = (setup.mean_length or setup.sequence_length) / setup.sequence_length
    return f"max_steps: {max(1, math.ceil(tokens / (setup.tokens_per_step * filled)))}"


def _flow(items: Iterable[Any]) -> str:
    return json.dumps(list(items), ensure_ascii=False)


def _fit(request: Request, memory: MemoryEstimate) -> str:
    half = (memory.high_bytes - memory.device_bytes) / _GIB
    gpu = request.machine.gpu
    return (
        f"Predicted peak memory: {memory.device_bytes / _GIB:.1f} ± {half:.1f} GiB of the "
        f"{format_bytes(gpu.memory_bytes)} of a {gpu.name}."
    )
