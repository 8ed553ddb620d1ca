"""What a rehearsal of `recipes/pretrain.py` launches, model parallelism included."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.launching.launch_file import LaunchFile
from accel_scale.rehearsing.plan import (
    CHECKPOINT_STEP,
    MAX_LENGTH,
    MICRO_BATCH_SIZE,
    NUM_STEPS,
    DataChoice,
    Rehearsal,
    for_the_cpu,
    is_cached,
    launcher_words,
)

# Of its checkpoints, and what is written into one last.
_CHECKPOINT, _COMPLETE_FILE = f"checkpoint-{CHECKPOINT_STEP}", "manifest.json"
_DEFAULT_MICRO_BATCH_SIZE = 8
_MODEL_FLAGS = (
    "model_name_or_path", "model_revision", "model_config", "num_params", "tokenizer", "train_tokenizer", "vocab_size",
)  # fmt: skip
_DATA_FLAGS = ("data", "text_column", "text_documents", "validation_data", "validation_share")
# Effects outside the rehearsal's folder, lengths of a real run, or minutes of work that say nothing about the launch.
_DROPPED_FLAGS = (
    "max_tokens", "max_train_time", "warmup_steps", "decay_from", "decay_steps", "keep_every", "resume", "report_to",
    "run_name", "profile_steps", "device_memory", "torch_compile", "plan", "plan_gpu",
)  # fmt: skip


def plan_pretraining_rehearsal(
    launch: LaunchFile, recipe: RecipeCommand, *, model_folder: Path, data: DataChoice, work: Path
) -> Rehearsal:
    """Cut the launch to a few CPU processes, two along each way that ranks are divided, and the recipe to small steps.

    A run that begins with random weights begins with random weights; one that goes on with a model goes on.

    Args:
        model_folder: The shrunken model, with its tokenizer.
        work: Folder for files that stand in for the user's.
    """
    degrees = shared_degrees(launch, recipe)
    num_processes, sizes, flags = _processes(launch, recipe, degrees)
    goes_on = recipe.value("model_name_or_path") is not None
    cut, notes = for_the_cpu(recipe, launch, work)
    if degrees:
        shared = ", ".join(f"--{name}_size {size} → 2" for name, size in degrees.items())
        notes.insert(0, f"ranks that share the model: {shared}")
    if recipe.value("decay_from") is not None:
        notes.append("--decay_from: rehearsed as a run of its own, without the trunk")
    micro_batch_size = min(_micro_batch_size(recipe), MICRO_BATCH_SIZE)
    num_readers = num_processes // 2 ** len(degrees)
    accumulation = _accumulation(recipe, (launch.num_processes or 1) // math.prod(degrees.values()), degrees)
    dropped = [*_DROPPED_FLAGS, *_MODEL_FLAGS, *(_DATA_FLAGS if data.replaced is not None else ())]
    cut = cut.without(dropped, work).with_flags(
        **{"model_name_or_path" if goes_on else "model_config": model_folder},
        **flags,
        max_steps=NUM_STEPS,
        save_steps=CHECKPOINT_STEP,
        keep_last=NUM_STEPS,
        logging_steps=1,
        eval_steps=0,
        eval_rows=2 * MICRO_BATCH_SIZE,
        max_length=min(int(recipe.value("max_length") or MAX_LENGTH), MAX_LENGTH),
        per_device_train_batch_size=micro_batch_size,
        global_batch_size=micro_batch_size * num_readers * accumulation,
    )
    if data.path is not None:
        cut = cut.with_flags(data=data.path)
    return Rehearsal(
        launcher_words(launch, num_processes, sizes, work),
        cut,
        num_processes,
        model_folder if goes_on else None,
        launch.parallel.offload_optimizer == "nvme",
        notes,
        resume_flag="resume",
        checkpoint=_CHECKPOINT,
        complete_file=_COMPLETE_FILE,
    )


def shared_degrees(launch: LaunchFile, recipe: RecipeCommand) -> dict[str, int]:
    """Ranks that share the model, by ``tp``, ``sp`` and ``pp``, where there are several; of flags and launch file.

    Raises:
        ConfigError: a flag is not a whole number.
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
    """Layers that the tiny model needs: one for each stage of a pipeline of two ranks, and two at least."""
    from accel_scale.facts.names import STAGES_PER_RANK

    if "pp" not in shared_degrees(launch, recipe):
        return 2
    default = STAGES_PER_RANK.get(str(recipe.value("pp_schedule")), 1)
    return 2 * int(recipe.value("pp_stages_per_rank") or default)


def _processes(
    launch: LaunchFile, recipe: RecipeCommand, degrees: dict[str, int]
) -> tuple[int, list[str], dict[str, int]]:
    """Processes to start, the launcher's flags for its mesh, and the recipe's for the ranks that share the model."""
    in_file = launch.values.get("parallelism_config") or {}
    wide = [name for name, size in in_file.items() if name.endswith("_size") and (size or 1) > 1]
    dimensions = set(degrees)
    dimensions |= {name for name in wide if "_dp_" in name}
    if not any("_dp_" in name for name in wide) and (launch.num_processes or 1) > math.prod(degrees.values()):
        dimensions.add("replicas or shards")
    sizes = [word for name in wide for word in (f"--{name}", "2")]
    flags = {f"{name}_size": 2 for name in degrees if recipe.value(f"{name}_size") is not None}
    return 2 ** len(dimensions), sizes, flags


def _micro_batch_size(recipe: RecipeCommand) -> int:
    return int(recipe.value("per_device_train_batch_size") or _DEFAULT_MICRO_BATCH_SIZE)


def _accumulation(recipe: RecipeCommand, num_readers: int, degrees: dict[str, int]) -> int:
    """Micro-batches per step: as many as a pipeline of two ranks needs; two where the real run accumulates; or one.

    Args:
        num_readers: Data-parallel ranks of the real run.
    """
    if "pp" in degrees:
        return 4
    per_step = _micro_batch_size(recipe) * max(num_readers, 1)
    return 2 if int(recipe.value("global_batch_size") or 0) > per_step else 1


def choose_text(recipe: RecipeCommand, *, fallback: Callable[[], str], own_tokenizer: bool) -> DataChoice:
    """The real text where all of it is on this machine, else the file that `fallback` makes.

    Nothing is downloaded, and text that was prepared with a tokenizer that is not here cannot be used.
    """
    from accel_scale.data.pretraining.prepared import is_prepared

    items = [str(item) for name in ("data", "validation_data") for item in recipe.values(name)]
    names = [item if os.path.exists(item) else item.rpartition("=")[0] or item for item in items]
    absent = [name for name in names if not (glob.glob(os.path.expanduser(name)) or is_cached(name))]
    absent += [name for name in names if name not in absent and is_prepared(name) and not own_tokenizer]
    if items and not absent:
        return DataChoice(None)
    return DataChoice(Path(fallback()), replaced=", ".join(absent))
