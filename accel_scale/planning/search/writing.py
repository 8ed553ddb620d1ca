"""Writes a plan as files that run it: the launch file, DeepSpeed's own if needed, and the recipe's flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.memory import MemoryEstimate
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.launch_writing import (
    DEEPSPEED,
    MARK,
    about,
    deepspeed_json,
    launch_yaml,
    needs_file,
    num_nodes,
)
from accel_scale.planning.search.recipe_choices import RecipeChoices
from accel_scale.planning.search.recipe_writing import recipe_lines
from accel_scale.planning.search.search import Candidate, Request
from accel_scale.shipped import named_script
from accel_scale.units import format_bytes

__all__ = ["RecipeChoices", "WrittenPlan", "plan_files", "write_files"]

LAUNCH, RECIPE = "launch.yaml", "recipe.yaml"


@dataclass(frozen=True)
class WrittenPlan:
    """Files of a plan and how to use them.

    Attributes:
        files: Path → contents.
        command: Command that starts the run, on every node if there are several.
        rehearsal: Command that first tries it at small scale on CPU processes.
    """

    files: Mapping[Path, str]
    command: str
    rehearsal: str


def plan_files(request: Request, candidate: Candidate, recipe: RecipeChoices, folder: Path) -> WrittenPlan:
    """The files of `candidate` as they will be in `folder`. Writes nothing.

    Raises:
        ConfigError: for a plan that the recipe cannot run.
    """
    setup = candidate.setup
    shared = {name for name, size in zip(("tp", "pp", "sp"), setup.parallel.degrees, strict=True) if size > 1}
    plan = request.recipe
    if not shared <= set(plan.shared_by):
        raise ConfigError(
            f"{plan.script} does not share its model between ranks, as {candidate.choice.label} does.",
            place="--write",
            fix="plan with --recipe pretrain.",
        )
    launch_path, recipe_path = folder / LAUNCH, folder / RECIPE
    command = _command(setup, launch_path, recipe_path, plan.script)
    head = [f"# {about(candidate)}", f"# {_fit(request, candidate.memory)}", "#"]
    files = {launch_path: "", recipe_path: "\n".join([*head, *recipe_lines(request, candidate, recipe)])}
    if needs_file(setup.parallel):
        files[folder / DEEPSPEED] = deepspeed_json(request.model, setup.parallel, folder)
    files[launch_path] = launch_yaml(candidate, command, folder)
    words = ["accel-scale", "rehearse", "--config_file", str(launch_path), plan.script]
    return WrittenPlan(files, command, shlex.join([*words, "--config_file", str(recipe_path)]))


def write_files(written: WrittenPlan) -> None:
    """Write the files; those of an earlier plan are replaced, others are not.

    Raises:
        ConfigError: if a file exists that is not a plan's, or a file cannot be written.
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
    """The command line, from a checkout or not; `$SLURM_NODEID` and `$NODE_0` are left to the shell of each node."""
    nodes = " --machine_rank $SLURM_NODEID --main_process_ip $NODE_0" if num_nodes(setup.parallel) > 1 else ""
    files = shlex.quote(str(launch)), shlex.quote(str(recipe))
    name = Path(script).stem
    quoted = shlex.quote(script)
    if named_script(script) != Path(script):  # not in a checkout, but the package has it
        if not nodes:
            return f"accel-scale {name} --launch {files[0]} --config_file {files[1]}"
        quoted = f'"$(accel-scale recipes path {name})"'
    return f"accelerate launch --config_file {files[0]}{nodes} {quoted} --config_file {files[1]}"


def _fit(request: Request, memory: MemoryEstimate) -> str:
    gpu = request.machine.gpu
    return f"Predicted peak memory: {memory.text} of the {format_bytes(gpu.memory_bytes)} of a {gpu.name}."
