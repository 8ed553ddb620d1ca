"""Plans what a rehearsal launches: the user's launch file and recipe, changed only in size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from accel_scale.data.default import labelled_of, pairs_of, write_pictured
from accel_scale.facts.names import FIRST_POWERSGD_STEP
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.flags.paths import without_weight
from accel_scale.launching.launch_file import LaunchFile
from accel_scale.launching.strategy import is_true
from accel_scale.recipe_specs.spec import RecipeSpec
from accel_scale.recipe_specs.trl import SFT

NUM_ROWS = 256
NUM_PICTURED_ROWS = 32
# Runs scripts that do not support CPU processes themselves.
RUNNER = str(Path(__file__).with_name("run_on_cpu.py"))
# An NVMe buffer holds one tensor; the largest tensor of a shrunken model is its embedding.
NVME_BUFFER_NUMEL = 40_000_000


@dataclass(frozen=True)
class DataChoice:
    """The data that the rehearsal trains on.

    Attributes:
        path: A small local file; None to keep the recipe's own data flags.
        replaced: The data that the file stands in for, if the file is not an excerpt of it.
    """

    path: Path | None
    replaced: str | None = None


@dataclass(frozen=True)
class Rehearsal:
    """One rehearsal, ready to launch.

    Attributes:
        launcher: The `accelerate launch` command without the script.
        recipe: The recipe with its flags, without ``--output_dir`` and the resume flag.
        num_processes: Number of CPU processes.
        start: Folder of the model to start from; None if the run initialises its own weights.
        optimizer_on_nvme: Whether DeepSpeed keeps optimizer states on disk.
        notes: Differences from the real run other than size, one sentence each.
        spec: The recipe's declared spec.
    """

    launcher: list[str]
    recipe: RecipeCommand
    num_processes: int
    start: Path | None
    optimizer_on_nvme: bool = False
    notes: list[str] = field(default_factory=list)
    spec: RecipeSpec = SFT

    def command(self, output_dir: Path, *, resume_from: Path | None = None) -> list[str]:
        """The full command line of one launch."""
        recipe = self.recipe.with_flags(output_dir=output_dir)
        if resume_from is not None and self.spec.resume_flag is not None:
            recipe = recipe.with_flags(**{self.spec.resume_flag: resume_from})
        runner = [] if self.spec.rehearsal.runs_on_cpu else [RUNNER]
        return [*self.launcher, "--main_process_port", "0", *runner, str(recipe.script), *recipe.words]


def plan_rehearsal(
    launch: LaunchFile,
    recipe: RecipeCommand,
    *,
    model_folder: Path | None,
    data: DataChoice,
    work: Path,
    spec: RecipeSpec = SFT,
    has: Callable[[str], bool] = lambda flag: True,
) -> Rehearsal:
    """Cut the launch to a few CPU processes and the recipe to a few small steps of a tiny model.

    Args:
        model_folder: The shrunken model; None if the script trains its own.
        work: Folder for files that replace the user's.
        spec: The recipe's declared spec.
        has: Returns whether the recipe has a flag; missing flags are not set.
    """
    cuts = spec.rehearsal
    in_groups = int(recipe.value("sp_size") or launch.parallel.sequence_parallel_size)
    num_processes, sizes = rehearsed_processes(launch, in_groups)
    launcher = launcher_words(launch, num_processes, sizes, work)
    recipe, notes = for_the_cpu(recipe, launch, work)
    dropped = [*cuts.dropped, *filter(None, [spec.resume_flag])]
    if data.path is not None and cuts.data_flag is not None:
        dropped += cuts.data_flags if data.replaced else [cuts.data_flag]
    flags = dict(cuts.values)
    flags |= {name: min(int(recipe.value(name) or most), most) for name, most in cuts.at_most.items()}
    flags[cuts.batch_flag] = _accumulation(recipe, (launch.num_processes or 1) // in_groups)
    if model_folder is not None and cuts.model_flag is not None:
        flags[cuts.model_flag] = model_folder
    if data.path is not None and cuts.data_flag is not None:
        flags[cuts.data_flag] = data.path
    if recipe.value("sp_size") and in_groups > 1:
        flags["sp_size"] = 2
    cut = recipe.without(dropped, work).with_flags(**{name: value for name, value in flags.items() if has(name)})
    on_nvme = launch.parallel.offload_optimizer == "nvme"
    return Rehearsal(launcher, cut, num_processes, model_folder, on_nvme, notes, spec)


def has_trainer_flag(recipe: RecipeCommand, spec: RecipeSpec, flag: str) -> bool:
    """True if a script without a spec takes `flag`: a flag of transformers, or one on its command line."""
    cuts = spec.rehearsal
    return flag in (*cuts.values, cuts.batch_flag, "per_device_train_batch_size") or flag in recipe.names()


def launcher_words(launch: LaunchFile, num_processes: int, sizes: Iterable[str], work: Path) -> list[str]:
    """The `accelerate launch` words that run `launch` on CPU processes of this machine.

    Args:
        sizes: Flags that shrink the device mesh to that number of processes.
        work: Folder for ZeRO-Infinity's files.
    """
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launch.path)]
    words += ["--num_processes", str(num_processes), "--gpu_ids", "all", *sizes]
    if (launch.values.get("num_machines") or 1) > 1:
        words += ["--num_machines", "1", "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    return words + nvme_flags(launch, work)


def for_the_cpu(recipe: RecipeCommand, launch: LaunchFile, work: Path) -> tuple[RecipeCommand, list[str]]:
    """The recipe adapted to run on a CPU in a few steps, with a note on each change."""
    notes = []
    attention = str(recipe.value("attn_implementation", ""))
    if attention and attention not in ("eager", "sdpa"):
        recipe = recipe.without(["attn_implementation"], work)
        notes.append(f"attention: chosen for the CPU, {attention} needs a GPU")
    if is_true(recipe.value("activation_offloading", "false")):
        recipe = recipe.without(["activation_offloading"], work)
        notes.append("activations: kept, on a CPU they are in host memory already")
    if "fp8" in (launch.mixed_precision, recipe.value("precision")):
        recipe = recipe.with_flags(fp8_emulate="true")
        notes.append("fp8: matrix products emulated")
    if recipe.value("ddp_comm_hook") == "powersgd":
        recipe = recipe.with_flags(powersgd_start_step=FIRST_POWERSGD_STEP)
        notes.append(f"PowerSGD: from step {FIRST_POWERSGD_STEP} on")
    return recipe, notes


def rehearsed_processes(launch: LaunchFile, in_groups: int = 1) -> tuple[int, list[str]]:
    """Number of processes to start, and launcher flags that shrink the device mesh to match.

    One process stays one, more become two, and a mesh becomes two along each dimension: hybrid sharding 2 × 2.

    Args:
        in_groups: Ranks that share rows, if set by the recipe's own flag; they become two as well.
    """
    sizes = launch.values.get("parallelism_config") or {}
    wide = [name for name, size in sizes.items() if name.endswith("_size") and (size or 1) > 1]
    if wide:
        is_in_file = launch.parallel.sequence_parallel_size > 1
        dimensions = len(wide) + (in_groups > 1 and not is_in_file)
        return 2**dimensions, [word for name in wide for word in (f"--{name}", "2")]
    if in_groups > 1:
        return 2 * min((launch.num_processes or in_groups) // in_groups, 2), []
    return min(launch.num_processes or 2, 2), []


def _accumulation(recipe: RecipeCommand, num_readers: int) -> int:
    """Micro-batches per step: two if the real run accumulates gradients, else one.

    Args:
        num_readers: Ranks of the real run, or groups of ranks, that read different rows.
    """
    explicit = int(recipe.value("gradient_accumulation_steps") or 1)
    per_step = int(recipe.value("per_device_train_batch_size") or 8) * num_readers
    return 2 if explicit > 1 or int(recipe.value("global_batch_size") or 0) > per_step else 1


def nvme_flags(launch: LaunchFile, work: Path) -> list[str]:
    """Launcher flags that put ZeRO-Infinity's files below `work`, with buffers sized for tiny tensors."""
    if not launch.parallel.nvme_paths:
        return []
    folder = str(work / "nvme")
    if launch.deepspeed_file is None:
        return ["--offload_optimizer_nvme_path", folder, "--offload_param_nvme_path", folder]
    config = json.loads(json.dumps(launch.deepspeed_file.values))
    for section in config["zero_optimization"].values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = folder
        if isinstance(section, dict) and "buffer_size" in section:
            section["buffer_size"] = min(section["buffer_size"], NVME_BUFFER_NUMEL)
    copy = work / launch.deepspeed_file.path.name
    copy.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return ["--deepspeed_config_file", str(copy)]


def choose_data(
    recipe: RecipeCommand,
    work: Path,
    *,
    fallback: Iterable[Mapping[str, Any]],
    has_chat_template: bool,
    spec: RecipeSpec = SFT,
) -> DataChoice:
    """Choose the real data set if it is on this machine, cut to a few rows where that is simple; else `fallback` rows.

    Nothing is downloaded: a rehearsal must not wait for a corpus. A recipe without a data set trains on its own
    default, which is `fallback`.

    Args:
        fallback: Rows of ``messages`` with a question and its answer; a preference recipe gets pairs made from them.
        has_chat_template: Whether the tokenizer has a chat template; else rows become prompt and completion.
    """
    flag = spec.rehearsal.data_flag
    names = [] if flag is None else [str(name) for name in recipe.values(flag)]
    names += [without_weight(str(item)) for item in recipe.values("dataset_mixture")]
    absent = [name for name in names if not Path(name).exists() and not is_cached(name)]
    if spec.rehearsal.data == "own" and (absent or not names):
        return DataChoice(None)  # no stand-in is available
    if not names and recipe.value("model_name_or_path"):
        return DataChoice(None)  # the recipe itself reports the missing data
    if names and not absent:
        source = Path(names[0])
        is_lines = len(names) == 1 and source.is_file() and source.suffix in (".jsonl", ".txt")
        return DataChoice(_first_lines(source, work / source.name) if is_lines else None)
    turns = has_chat_template or str(recipe.value("assistant_only_loss")).lower() == "true"
    path = work / "rehearsal_rows.jsonl"
    if spec.rehearsal.data == "images":
        write_pictured(path, fallback, count=NUM_PICTURED_ROWS)
        return DataChoice(path, replaced=", ".join(absent) or None)
    with path.open("w", encoding="utf-8") as file:
        for row in islice(_stand_ins(fallback, spec.rehearsal.data), NUM_ROWS):
            file.write(json.dumps(row if turns else _as_text(row)) + "\n")
    return DataChoice(path, replaced=", ".join(absent) or None)


def _stand_ins(rows: Iterable[Mapping[str, Any]], kind: str) -> Iterable[Mapping[str, Any]]:
    """Convert rows of ``messages`` to the format of this kind of data."""
    if kind == "pairs":
        return pairs_of(rows)
    return labelled_of(rows) if kind == "labels" else ({"messages": row["messages"]} for row in rows)


def _as_text(row: Mapping[str, Any]) -> dict[str, object]:
    if "messages" in row:
        question, answer = row["messages"][-2:]
        return {"prompt": question["content"] + "\n", "completion": answer["content"]}
    said = {name: turns if name == "label" else turns[-1]["content"] for name, turns in row.items()}
    return {**said, "prompt": said["prompt"] + "\n"}


def _first_lines(source: Path, target: Path) -> Path:
    with source.open("rb") as lines:
        target.write_bytes(b"".join(islice(lines, NUM_ROWS)))
    return target


def is_cached(name: str) -> bool:
    """True if the Hub data set `name` has been downloaded to this machine."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "snapshots").is_dir()


class CheckFailed(Exception):
    """A check failed; the message is for the user."""
