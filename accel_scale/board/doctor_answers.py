"""Content of the "Doctor" tab: `accel-scale doctor` on the dropped files, run in a separate process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import yaml

from accel_scale.board.rendering import filled
from accel_scale.board.uploads import Dropped, read_all
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import CONFIG_STATUS
from accel_scale.planning.search.recipe_choices import PLANNED_RECIPES
from accel_scale.secrets import mask
from accel_scale.shipped import launch_names
from accel_scale.units import format_bytes

_SECONDS = 120.0
_LAUNCH, _RECIPE = "launch.yaml", "recipe.yaml"
_CREDENTIAL = re.compile("token|key|secret|password|credential", re.IGNORECASE)
RECIPES = tuple(PLANNED_RECIPES)


class _Machine(TypedDict):
    """The shown part of the machine section of `accel-scale doctor --json`."""

    accelerator: dict[str, str]
    num_devices: int
    num_cores: int
    host_memory_bytes: int
    packages: dict[str, str]


class _Diagnosis(TypedDict):
    """The shown part of the output of `accel-scale doctor --json`."""

    machine: _Machine
    launch: dict[str, str]
    findings: list[dict[str, str]]


def diagnosis(launch_name: str | None, launch: Sequence[str], recipe: str | None, flags: Sequence[str]) -> str:
    """Findings of `accel-scale doctor`.

    Args:
        launch_name: Name of a launch file that ships with the package; None uses the dropped one, if any.
        launch: Paths of a dropped launch file and of the DeepSpeed file it names.
        recipe: One of `RECIPES`, or None.
        flags: Path of a dropped YAML file with the recipe's flags.

    Raises:
        ConfigError: for files that cannot be read, and if the command does not answer.
    """
    dropped = read_all({_LAUNCH: launch, _RECIPE: flags})
    with tempfile.TemporaryDirectory(prefix="accel-scale-doctor-") as name:
        folder = Path(name)
        words = [
            *_launch_words(launch_name, dropped[_LAUNCH], folder),
            *_recipe_words(recipe, dropped[_RECIPE], folder),
        ]
        found = _run(words, folder)
    paths = [path for files in dropped.values() for file in files for path in file.replaced]
    return filled(
        "doctor",
        findings=found["findings"],
        num_errors=sum(finding["level"] == "error" for finding in found["findings"]),
        launch=found["launch"],
        machine=_machine_rows(found["machine"]),
        paths=paths,
        command=" ".join(["accel-scale", "doctor", *words]),
    )


def _machine_rows(machine: _Machine) -> dict[str, str]:
    device = machine["accelerator"]["name"] or machine["accelerator"]["type"]
    count = machine["num_devices"]
    return {
        "accelerators": f"{count} × {device}" if count else "none",
        "host": f"{machine['num_cores']} cores, {format_bytes(machine['host_memory_bytes'])}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine["packages"].items()),
    }


def _launch_words(name: str | None, files: Sequence[Dropped], folder: Path) -> list[str]:
    if name is not None and files:
        raise ConfigError(
            "two launch files are named.", place="Launch file", fix="remove the dropped one, or pick none."
        )
    if name is not None:
        if name not in launch_names():
            raise ConfigError(f"there is no launch file {name!r}.", place="Launch file", fix="pick one of the list.")
        return ["--config_file", name]
    settings = [file for file in files if not file.name.endswith(".json")]
    if files and len(settings) != 1:
        what = "no YAML file" if not settings else "several YAML files"
        raise ConfigError(
            f"{what} among {len(files)}.", place="Launch file", fix="drop one, and DeepSpeed's JSON with it."
        )
    for file in files:
        _refuse_other_files(file, files)
        (folder / file.name).write_text(file.text, encoding="utf-8")
    return ["--config_file", settings[0].name] if settings else []


def _refuse_other_files(file: Dropped, files: Sequence[Dropped]) -> None:
    """Refuse a missing DeepSpeed file: the command would search every parent folder for it and show its content."""
    try:
        section = yaml.safe_load(file.text)["deepspeed_config"]
        name = str(section["deepspeed_config_file"])
    except (yaml.YAMLError, ValueError, TypeError, KeyError):
        return  # it names none, or is unreadable, which the command reports before reading anything else
    if name not in [each.name for each in files]:
        raise ConfigError(
            f"names {Path(name).name!r}, which was not dropped with it.",
            place=f"{file.name}: deepspeed_config_file",
            fix="drop DeepSpeed's JSON too.",
        )


def _recipe_words(recipe: str | None, files: Sequence[Dropped], folder: Path) -> list[str]:
    if recipe is not None and recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}.", place="Recipe", fix="pick one of the list.")
    if files and recipe is None:
        raise ConfigError("whose flags are these?", place=files[0].name, fix="pick a recipe.")
    if len(files) > 1:
        raise ConfigError("several files of flags.", place=files[1].name, fix="drop one.")
    words = [recipe] if recipe is not None else []
    for file in files:
        name = file.name if not (folder / file.name).exists() else f"flags-{file.name}"
        (folder / name).write_text(file.text, encoding="utf-8")
        words += ["--config_file", name]
    return words


def _run(words: Sequence[str], folder: Path) -> _Diagnosis:
    """Run the command in `folder`, without network access or credentials, and return its answer."""
    kept = {name: value for name, value in os.environ.items() if not _CREDENTIAL.search(name)}
    # PYTHONSAFEPATH: no module is imported from the upload folder.
    environment = {**kept, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "accel_scale.cli.main", "doctor", "--json", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"no answer in {_SECONDS:.0f} s.", place="doctor", fix="run it in a terminal.") from None
    try:
        found: _Diagnosis = json.loads(done.stdout)
        return found
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        if done.returncode != CONFIG_STATUS:  # a bug: its output goes to the terminal, not to visitors of the page
            line = f"the doctor ended with status {done.returncode} ({mask(said)})"
            print(f"accel-scale board: {line}.", file=sys.stderr, flush=True)
            said = "it ended with an error."
        raise ConfigError(f"no diagnosis: {said}", place="doctor", fix="run it in a terminal.") from None
