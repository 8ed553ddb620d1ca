"""Run the SFT recipe under every launch file and method with the same data, and compare losses and final weights.

Every launch is a real `accelerate launch` of the unmodified launch file on CPU processes. The only overrides are
precision (fp32, so that only the order of additions differs), ZeRO-Infinity's folder and, for files of several
nodes, the number of processes and the addresses. The reference is DDP, which is itself compared with one process at
the same global batch.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file

from accel_scale.launching.launch_file import read_launch_file
from accel_scale.rehearsing.plan import nvme_flags
from accel_scale.rehearsing.rehearse import error_lines

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "accelerate_configs"
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
METHODS = ("full", "lora", "qlora")
REFERENCE, SINGLE = "ddp", "cpu"
TOLERANCE = 1e-4
NUM_STEPS, GLOBAL_BATCH_SIZE = 4, 4
# More rows than four steps need, so that no run reaches the end of the data, where ranks repeat rows to stay in step.
NUM_ROWS = 48
# Files that run as one process on a CPU and so leave nothing to compare.
SINGLE_PROCESS_FILES = {
    "cpu": "the single process that DDP is compared with",
    "single_gpu": "that process on a GPU, held to the CPU's losses there by `benchmarks/gpu_check.py`",
}
# Files for recipes/pretrain.py, which the SFT recipe refuses → their layout in benchmarks/model_parallel_parity.py,
# which test_model_parallel_recipe.py runs.
MODEL_PARALLEL_FILES = {
    "tp": "tp2",
    "pp": "pp2",
    "3d": "pp2 x tp2 x fsdp2",
    "fsdp2_tp": "fsdp2 x tp2",
}
# Options that are exact under any launch, switched on in some: segment checkpointing, where layers are whole.
EXACT_FLAGS = {
    "zero1": ["--checkpointing_policy", "segments"],
    "zero2": ["--checkpointing_policy", "segments_3"],
}
# The same for the launcher's options: weights gathered ahead.
EXACT_LAUNCH = {"fsdp2_hybrid": ["--fsdp_forward_prefetch", "true"]}


@dataclass(frozen=True)
class Result:
    """The outcome of one run: its losses and the weights it saved, by name."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest relative differences between two runs.

    Attributes:
        loss: max over steps of \\|a − b\\| ÷ \\|b\\|.
        weight: max over tensors of ‖A − B‖ ÷ ‖B‖ (L2).
    """

    loss: float
    weight: float


class RunFailed(RuntimeError):
    """A launch that failed, with the errors that its processes reported."""


def launch_names() -> list[str]:
    """Names of the launch files that start more than one process of the SFT recipe."""
    others = SINGLE_PROCESS_FILES.keys() | MODEL_PARALLEL_FILES.keys()
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in others)


def compare(result: Result, reference: Result) -> Difference:
    """Relative differences of `result` from `reference`; refuses runs with different tensors."""
    assert result.weights.keys() == reference.weights.keys(), sorted(result.weights.keys() ^ reference.weights.keys())
    assert len(result.losses) == len(reference.losses) == NUM_STEPS
    losses = zip(result.losses, reference.losses, strict=True)
    return Difference(
        loss=max(abs(a - b) / abs(b) for a, b in losses),
        weight=max(_relative_norm(result.weights[name], b) for name, b in reference.weights.items()),
    )


def _relative_norm(a: torch.Tensor, b: torch.Tensor) -> float:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


@functools.cache
def results(name: str) -> dict[str, Result]:
    """Results of one launch of the launch file `name`, by method.

    Raises:
        RunFailed: if a method failed; the message holds the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix=f"parity-{name}-") as folder:
        extra = EXACT_FLAGS.get(name, [])
        flags = {method: [*recipe_flags(method, Path(folder)), *extra] for method in METHODS}
        return run_launch(name, flags, Path(folder))


def folder_until_exit(prefix: str) -> Path:
    """A folder for results that several tests read, removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def wrong_batch_difference() -> Difference:
    """Difference between DDP and itself at half the global batch, the classic mistake of a wrong accumulation."""
    with tempfile.TemporaryDirectory(prefix="parity-wrong-") as folder:
        flags = recipe_flags("lora", Path(folder), global_batch_size=GLOBAL_BATCH_SIZE // 2)
        wrong = run_launch(REFERENCE, {"lora": flags}, Path(folder))["lora"]
    return compare(wrong, results(REFERENCE)["lora"])


def recipe_flags(method: str, folder: Path, *, global_batch_size: int = GLOBAL_BATCH_SIZE) -> list[str]:
    """The recipe's flags for one run: fp32, no dropout, a learning rate that moves the weights by a few percent."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        with (SHARED_DATA / "gsm8k" / "train.jsonl").open() as lines:
            rows.write_text("".join(next(lines) for _ in range(NUM_ROWS)))
    return [
        *("--model_name_or_path", str(SHARED_DATA / "stories260k")),
        *("--dataset_name", str(rows)),
        *("--columns", "prompt=question", "completion=answer"),
        *("--method", method, "--precision", "fp32", "--lora_dropout", "0"),
        *("--max_steps", str(NUM_STEPS), "--learning_rate", "1e-3", "--max_length", "256", "--packing", "false"),
        *("--global_batch_size", str(global_batch_size), "--per_device_train_batch_size", "1"),
        *("--logging_steps", "1", "--save_strategy", "no", "--exact_match_samples", "0"),
    ]


def pretrain_flags(model: Path, folder: Path) -> list[str]:
    """The flags of recipes/pretrain.py for a run like that of `recipe_flags`."""
    texts = folder / "texts.jsonl"
    with (SHARED_DATA / "gsm8k" / "train.jsonl").open() as lines:
        rows = [json.loads(next(lines)) for _ in range(NUM_ROWS)]
    texts.write_text("".join(json.dumps({"text": row["question"] + row["answer"]}) + "\n" for row in rows))
    return [
        *("--model_name_or_path", str(model), "--data", str(texts), "--precision", "fp32", "--max_length", "64"),
        *("--max_steps", str(NUM_STEPS), "--learning_rate", "1e-3", "--logging_steps", "1", "--save_steps", "0"),
        *("--global_batch_size", str(GLOBAL_BATCH_SIZE), "--per_device_train_batch_size", "1"),
        *("--sample_tokens", "0", "--dataloader_num_workers", "0"),
    ]


def run_launch(name: str, flags_by_run: dict[str, list[str]], folder: Path) -> dict[str, Result]:
    """Launch `name` once and run the recipe once per entry of `flags_by_run`, one after the other.

    The recipe is pretrain.py if the flags come from `pretrain_flags`, otherwise sft.py.
    """
    runs = [
        {
            "recipe": str(REPOSITORY / "recipes" / ("pretrain.py" if "--data" in flags else "sft.py")),
            "argv": [*flags, "--output_dir", str(folder / run)],
            "log": str(folder / f"{run}.log"),
        }
        for run, flags in flags_by_run.items()
    ]
    (folder / "runs.json").write_text(json.dumps(runs))
    script = [str(Path(__file__).with_name("run_recipe_forked.py")), str(folder / "runs.json")]
    ahead = EXACT_LAUNCH.get(name, [])
    commands = [[*command, *ahead, *script] for command in launch_commands(name, folder)]
    _run_all(commands, folder)
    return {run: _read_result(folder / run) for run in flags_by_run}


def launch_commands(name: str, folder: Path) -> list[list[str]]:
    """The `accelerate launch` commands of a launch file: one, or one per node if the file is for several nodes."""
    path = CONFIGS / f"{name}.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    launch_file = read_launch_file(path)
    launch += nvme_flags(launch_file, folder)
    if launch_file.mixed_precision is not None:
        launch += ["--mixed_precision", "no"]
    num_machines = launch_file.values.get("num_machines") or 1
    if num_machines == 1:
        return [[*launch, "--main_process_port", "0"]]
    here = ["--num_processes", str(num_machines), "--main_process_ip", "127.0.0.1"]
    here += ["--main_process_port", str(get_free_port())]
    return [[*launch, *here, "--machine_rank", str(rank)] for rank in range(num_machines)]


def _run_all(commands: list[list[str]], folder: Path, *, timeout_seconds: float = 540.0) -> None:
    """Start `commands` together and wait for all of them; neither they nor their children outlive this call."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    log = folder / "launch.log"
    with log.open("wb") as output:
        launched = [
            subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            for command in commands
        ]
        try:
            statuses = [process.wait(timeout_seconds) for process in launched]
        finally:
            for process in launched:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    if any(statuses):
        raise RunFailed(_last_lines(folder))


def _last_lines(folder: Path) -> str:
    """The last lines of each process of each run, errors first if there are any."""
    logs = sorted(path for path in folder.glob("*.log.[0-9]") if path.stat().st_size) or [folder / "launch.log"]
    return "\n".join(f"{path.name}: {line}" for path in logs for line in error_lines(path.read_text(errors="replace")))


def _read_result(folder: Path) -> Result:
    summary = json.loads((folder / "run_summary.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return Result(losses=summary["losses"], weights=weights)
