"""Stages `recipes`, `launches` and `cards`: commands as typed by users, each in its own process."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypedDict

from gpu_stages.box import Cases, Needs, Wrong, expect
from gpu_stages.inputs import written_documents, written_model
from gpu_stages.many import TOLERANCE, compiled, launches
from gpu_stages.recipe import REPOSITORY, train, words
from gpu_stages.training import MEMORY_TOLERANCE

sys.path.insert(0, str(REPOSITORY / "tests" / "recipes"))

from accel_scale.facts.hardware import CONTEXT_BYTES, find_gpu
from accel_scale.launching.launch_file import read_launch_file


class Summary(TypedDict, total=False):
    """The fields of `run_summary.json` that are read here."""

    losses: list[float]
    tokens_per_second: float
    peak_device_bytes: dict[str, int]
    memory_recovery: dict[str, object] | None


_STEPS = 4
_SHORT: dict[str, object] = {"max_steps": _STEPS, "logging_steps": 1}
_SFT = _SHORT | {"exact_match_samples": 0}
_FEW_ANSWERS = _SHORT | {"num_generations": 4, "exact_match_samples": 0}
# Recipe and flags by label; uses the embedded model and data unless a flag names others.
RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "sft": ("sft", _SFT),
    "sft, qlora": ("sft", _SFT | {"method": "qlora"}),
    "sft, compiled": ("sft", _SFT | {"torch_compile": True}),
    "pretrain": ("pretrain", _SHORT | {"save_steps": 0}),
    "pretrain, compiled": ("pretrain", _SHORT | {"save_steps": 0, "torch_compile": True}),
    "dpo": ("dpo", _SHORT),
    "kto": ("kto", _SHORT),
    "reward": ("reward", _SHORT),
    "grpo": ("grpo", _FEW_ANSWERS | {"model_name_or_path": "tuned"}),
    "rloo": ("rloo", _FEW_ANSWERS | {"model_name_or_path": "tuned"}),
}
ON_CPU = ("sft", "dpo")
# Files checked with one process on a CPU; on a GPU, all files of DeepSpeed, FSDP2 and offloading that allow it.
FILES_ON_CPU = ("fsdp2",)
# Smaller cards that this one emulates, with their memory minus that of CUDA itself.
CARDS = ("RTX 4090", "T4", "RTX 3060 12GB")


def recipes(cases: Cases) -> None:
    """Run some steps of each recipe: losses must be finite, and there must be no warnings that users cannot act on."""
    from pictures import write_model, write_pictures

    pictures = cases.folder / "pictures"
    if not pictures.is_dir():
        write_model("idefics3", cases.folder / "idefics3")
        write_pictures(pictures, several=True)
    if cases.on_gpu:  # slightly tuned, because rewards need answers
        train(cases.folder / "tuned", max_steps=19, plan="off", exact_match_samples=0)
    seeing: dict[str, object] = {"model_name_or_path": cases.folder / "idefics3", "dataset_name": pictures}
    named = {**RECIPES, "vision": ("vision", _SHORT | seeing)} if cases.on_gpu else {n: RECIPES[n] for n in ON_CPU}
    together(cases, {name: functools.partial(first_command, cases, name, *of) for name, of in named.items()})


def together(cases: Cases, runs: dict[str, Callable[[], str]]) -> None:
    """Run cases by label, several at once on a GPU, where each has a core or two for its imports."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3) if cases.on_gpu else 1) as pool:
        for name, run in runs.items():
            pool.submit(cases.case, name, run)


def launched(cases: Cases, name: str, command: list[str]) -> tuple[Summary, str]:
    """Run a command that must succeed; returns its summary and stderr."""
    out = cases.folder / name.replace(", ", "_")
    shutil.rmtree(out, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [*command, "--output_dir", str(out)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    print(f"── {name}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}", flush=True)
    if done.returncode:
        from accel_scale.rehearsing.rehearse import error_lines

        said = error_lines(done.stderr)
        raise Wrong(f"status {done.returncode}: {said[-1][:240] if said else 'no output'}")
    return json.loads((out / "run_summary.json").read_text()), done.stderr


def one_device(cases: Cases) -> list[str]:
    """The `accelerate launch` command as typed by users, with a free port."""
    file = launches.CONFIGS / ("single_gpu.yaml" if cases.on_gpu else "cpu.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return [*launch, "--main_process_port", "0"]


def recipe_path(name: str) -> str:
    """Path of a recipe by its name."""
    return str(REPOSITORY / "recipes" / f"{name}.py")


def first_command(cases: Cases, name: str, recipe: str, flags: dict[str, object]) -> str:
    """Run a recipe with the launch file for one process."""
    if flags.get("model_name_or_path") == "tuned":
        flags = flags | {"model_name_or_path": cases.folder / "tuned"}
    summary, said = launched(cases, name, [*one_device(cases), recipe_path(recipe), *words(flags)])
    warned = [line.strip() for line in said.splitlines() if "Warning" in line or "[W" in line]
    losses = summary["losses"]
    found = f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
    if warned:
        found += f"; warns: {warned[0][:160]}"
    return expect(len(losses) == _STEPS and all(map(math.isfinite, losses)) and not warned, found)


def one_process_files() -> list[str]:
    """Single-node launch files that also work with one process."""
    found = []
    for name in launches.launch_names():
        file = read_launch_file(launches.CONFIGS / f"{name}.yaml")
        if int(file.values.get("num_machines") or 1) == 1 and not name.endswith(("_sp", "_hybrid", "_tuned")):
            found.append(name)
    return found


def alone(cases: Cases) -> None:
    """Compare each launch file with one process, full and QLoRA, with the file for one GPU."""
    model, documents = written_model(cases.folder, "tiny", "cpu"), written_documents(cases.folder, 60)
    names = [name for name in one_process_files() if cases.on_gpu or name in FILES_ON_CPU]
    methods = ("full", "qlora") if cases.on_gpu else ("full",)

    @functools.cache
    def result(method: str, name: str) -> launches.Result:
        [start] = launches.launch_commands(name, cases.folder)
        flags: dict[str, object] = {
            "model_name_or_path": model, "dataset_name": documents, "method": method, "precision": "fp32",
            "max_steps": _STEPS, "learning_rate": 1e-3, "max_length": 64, "logging_steps": 1, "lora_dropout": 0,
            "global_batch_size": 4, "per_device_train_batch_size": 1, "packing": False, "save_strategy": "no",
            "exact_match_samples": 0, "plan": "off",
        }  # fmt: skip
        launched(cases, f"{name}_{method}", [*start, "--num_processes", "1", recipe_path("sft"), *words(flags)])
        return launches._read_result(cases.folder / f"{name}_{method}")

    def beside(method: str, name: str) -> str:
        difference = launches.compare(result(method, name), result(method, single))
        loss, weight = TOLERANCE[cases.device]
        found = f"losses {difference.loss:.1e}, weights {difference.weight:.1e} apart"
        return expect(difference.loss <= loss and difference.weight <= weight, found)

    def first(method: str) -> str:
        losses = result(method, single).losses
        return f"{len(losses)} steps, loss {losses[0]:.3f} → {losses[-1]:.3f}"

    single = "single_gpu" if cases.on_gpu else launches.SINGLE
    together(cases, {f"{single}, {method}": functools.partial(first, method) for method in methods})
    if cases.on_gpu:
        cases.case("DeepSpeed's operations for the host are compiled", compiled)
    runs = [(method, name) for method in methods for name in names]
    together(cases, {f"{name}, {method}": functools.partial(beside, method, name) for method, name in runs})


def cards(cases: Cases) -> None:
    """QLoRA of an 8B model at the longest rows predicted for smaller cards, limited to each card's memory."""
    for name in CARDS:
        cases.case(f"8B, QLoRA, {name}", functools.partial(capped, cases, name))


def capped(cases: Cases, name: str) -> str:
    """Run steps of one full row each, and compare the allocator's memory with the prediction and the card."""
    if not cases.on_gpu:
        raise Needs("needs a GPU")
    import accel_scale

    model = written_model(cases.folder, "8B", cases.device)
    card = find_gpu(name)
    plan = accel_scale.longest_row(str(model), gpu=name, method="qlora", strategy="one GPU")
    best, length = plan.best, plan.request.sequence_length
    assert best is not None
    room = int(card.memory_bytes - CONTEXT_BYTES)
    flags: dict[str, object] = {
        "model_name_or_path": model, "dataset_name": written_documents(cases.folder, 2000), "method": "qlora",
        "max_length": length, "per_device_train_batch_size": 1, "global_batch_size": 1, "max_steps": 3,
        "checkpointing_policy": best.setup.checkpointing, "optim": best.setup.optimizer, "logging_steps": 1,
        "device_memory": f"{room // 2**20}MiB", "save_strategy": "no", "exact_match_samples": 0, "packing": True,
    }  # fmt: skip
    summary, _ = launched(cases, name, [*one_device(cases), recipe_path("sft"), *words(flags)])
    reserved, allocated = (summary["peak_device_bytes"][f"{kind}_bytes"] for kind in ("reserved", "allocated"))
    error = best.memory.peak_bytes / allocated - 1
    found = f"rows of {length:,} tokens: allocated {allocated / 2**30:.2f} GiB, predicted {error:+.1%}"
    found += (
        f"; reserved {reserved / 2**30:.2f} of {room / 2**30:.2f} GiB, {summary['tokens_per_second']:,.0f} tokens/s"
    )
    return expect(abs(error) <= MEMORY_TOLERANCE and not summary.get("memory_recovery"), found)
