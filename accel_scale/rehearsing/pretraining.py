"""Plans what a rehearsal of `recipes/pretrain.py` launches, including model parallelism."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.launching.launch_file import LaunchFile
from accel_scale.recipe_specs.pretrain import PRETRAIN
from accel_scale.recipe_specs.spec import MICRO_BATCH_SIZE, RecipeSpec
from accel_scale.rehearsing.plan import DataChoice, Rehearsal, for_the_cpu, is_cached, launcher_words

_DEFAULT_MICRO_BATCH_SIZE = 8


def plan_pretraining_rehearsal(
    launch: LaunchFile,
    recipe: RecipeCommand,
    *,
    model_folder: Path,
    data: DataChoice,
    work: Path,
    spec: RecipeSpec = PRETRAIN,
) -> Rehearsal:
    """Cut the launch to a few CPU processes, two along each parallel dimension, and the recipe to small steps.

    A run that starts from random weights still does so; one that continues a model continues the shrunken one.

    Args:
        model_folder: The shrunken model, with its tokenizer.
        work: Folder for files that replace the user's.
    """
    degrees = shared_degrees(launch, recipe)
    num_processes, sizes, flags = _processes(launch, recipe, degrees)
    cuts = spec.rehearsal
    model_flag = cuts.model_flag or "model_name_or_path"
    goes_on = recipe.value(model_flag) is not None
    cut, notes = for_the_cpu(recipe, launch, work)
    if degrees:
        shared = ", ".join(f"--{name}_size {size} → 2" for name, size in degrees.items())
        notes.insert(0, f"ranks that share the model: {shared}")
    if recipe.value("decay_from") is not None:
        notes.append("--decay_from: rehearsed as a run of its own, without the trunk")
    micro_batch_size = min(_micro_batch_size(recipe), MICRO_BATCH_SIZE)
    num_readers = num_processes // 2 ** len(degrees)
    accumulation = _accumulation(recipe, (launch.num_processes or 1) // math.prod(degrees.values()), degrees)
    dropped = [*cuts.dropped, *(cuts.data_flags if data.replaced is not None else ())]
    flags |= cuts.values
    flags |= {name: min(int(recipe.value(name) or most), most) for name, most in cuts.at_most.items()}
    flags["per_device_train_batch_size"] = micro_batch_size
    flags["global_batch_size"] = micro_batch_size * num_readers * accumulation
    flags[model_flag if goes_on else cuts.config_flag or model_flag] = model_folder
    if data.path is not None and cuts.data_flag is not None:
        flags[cuts.data_flag] = data.path
    return Rehearsal(
        launcher_words(launch, num_processes, sizes, work),
        cut.without(dropped, work).with_flags(**flags),
        num_processes,
        model_folder if goes_on else None,
        launch.parallel.offload_optimizer == "nvme",
        notes,
        spec,
    )


def shared_degrees(launch: LaunchFile, recipe: RecipeCommand) -> dict[str, int]:
    """Degrees above 1 of ``tp``, ``sp`` and ``pp``, from the recipe's flags and the launch file.

    Raises:
        ConfigError: if a flag is not a whole number.
    """
    in_file = {"tp": launch.parallel.tensor_parallel_size, "sp": launch.parallel.sequence_parallel_size, "pp": 1}
    sizes = {}
    for name, size in in_file.items():
        given = recipe.value(f"{name}_size")
        try:
            sizes[name] = size if given is None else int(given)
        except ValueError:
            raise ConfigError(
                f"{given!r} is not a whole number.", place=f"--{name}_size", fix="use 1 or more."
            ) from None
    return {name: size for name, size in sizes.items() if size > 1}


def min_layers(launch: LaunchFile, recipe: RecipeCommand) -> int:
    """Layers that the tiny model needs: one per stage of a pipeline of two ranks, and at least two."""
    from accel_scale.facts.names import STAGES_PER_RANK

    if "pp" not in shared_degrees(launch, recipe):
        return 2
    default = STAGES_PER_RANK.get(str(recipe.value("pp_schedule")), 1)
    return 2 * int(recipe.value("pp_stages_per_rank") or default)


def _processes(
    launch: LaunchFile, recipe: RecipeCommand, degrees: dict[str, int]
) -> tuple[int, list[str], dict[str, object]]:
    """Number of processes, launcher flags for the mesh, and recipe flags for the ranks that share the model."""
    in_file = launch.values.get("parallelism_config") or {}
    wide = [name for name, size in in_file.items() if name.endswith("_size") and (size or 1) > 1]
    dimensions = set(degrees)
    dimensions |= {name for name in wide if "_dp_" in name}
    if not any("_dp_" in name for name in wide) and (launch.num_processes or 1) > math.prod(degrees.values()):
        dimensions.add("replicas or shards")
    sizes = [word for name in wide for word in (f"--{name}", "2")]
    flags: dict[str, object] = {f"{name}_size": 2 for name in degrees if recipe.value(f"{name}_size") is not None}
    return 2 ** len(dimensions), sizes, flags


def _micro_batch_size(recipe: RecipeCommand) -> int:
    return int(recipe.value("per_device_train_batch_size") or _DEFAULT_MICRO_BATCH_SIZE)


def _accumulation(recipe: RecipeCommand, num_readers: int, degrees: dict[str, int]) -> int:
    """Micro-batches per step: what a pipeline of two ranks needs, else two if the real run accumulates, else one.

    Args:
        num_readers: Data-parallel ranks of the real run.
    """
    if "pp" in degrees:
        return 4
    per_step = _micro_batch_size(recipe) * max(num_readers, 1)
    return 2 if int(recipe.value("global_batch_size") or 0) > per_step else 1


def choose_text(recipe: RecipeCommand, *, fallback: Callable[[], str], own_tokenizer: bool) -> DataChoice:
    """Choose the real text if all of it is on this machine, else the file that `fallback` creates.

    Nothing is downloaded, and text prepared with a tokenizer that is not available here cannot be used.
    """
    from accel_scale.data.pretraining.prepared import is_prepared

    items = [str(item) for name in ("data", "validation_data") for item in recipe.values(name)]
    names = [item if os.path.exists(item) else item.rpartition("=")[0] or item for item in items]
    absent = [name for name in names if not (glob.glob(os.path.expanduser(name)) or is_cached(name))]
    absent += [name for name in names if name not in absent and is_prepared(name) and not own_tokenizer]
    if items and not absent:
        return DataChoice(None)
    return DataChoice(Path(fallback()), replaced=", ".join(absent))
