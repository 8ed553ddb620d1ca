"""Stages `parity` and `hang`: every launch file must train the same model, and a stopped rank must be named."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_stages.box import Cases, Needs, Wrong, expect, lacks
from gpu_stages.inputs import written_documents, written_model
from gpu_stages.recipe import REPOSITORY, words

sys.path.insert(0, str(REPOSITORY / "tests" / "distributed"))

import parity as launches

from accel_scale.launching.launch_file import read_launch_file

# Relative tolerances of losses and weights. NCCL's rings and the GPU's kernels add in different orders, and Adam takes
# full steps on gradients that are almost zero. A wrong batch changes losses by more than 1e-3.
TOLERANCE = {"cuda": (2e-4, 2e-2), "cpu": (1e-5, 1e-3)}
LAUNCH_SECONDS = 150.0
# Layouts that the launch file alone does not determine.
EXTRA_FLAGS = {"pp": {"pp_size": 2}, "3d": {"pp_size": 2}}
HANG_SECONDS = 8
# One of each kind, since on a CPU `make test` runs every file with every method.
FILES_ON_CPU = ("fsdp2", "zero3", "tp")


class Gpus:
    """Pool of free GPUs; a launch takes as many as it needs, waiting if necessary."""

    def __init__(self, count: int) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._free = visible.split(",") if visible else [str(index) for index in range(count)]
        self.count, self._changed = len(self._free), threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[str]]:
        """Reserve `count` GPUs until the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            mine, self._free = self._free[:count], self._free[count:]
        try:
            yield mine
        finally:
            with self._changed:
                self._free += mine
                self._changed.notify_all()


class Once:
    """A function whose result or exception is computed once for each set of arguments, across threads."""

    def __init__(self, run: Callable[[str, str], launches.Result]) -> None:
        self._run, self._lock = run, threading.Lock()
        self._found: dict[tuple[str, str], Future[launches.Result]] = {}

    def __call__(self, method: str, name: str) -> launches.Result:
        """The cached result of `run`."""
        with self._lock:
            is_first = (method, name) not in self._found
            found = self._found.setdefault((method, name), Future())
        if is_first:
            try:
                found.set_result(self._run(method, name))
            except BaseException as error:
                found.set_exception(error)
        return found.result()


def parity(cases: Cases) -> None:
    """Run full fine-tuning under each file first, then adapters, and pretraining under files that split the model."""
    gpus = Gpus(cases.num_gpus)
    written_model(cases.folder, "tiny", "cpu")
    written_documents(cases.folder, 60)
    names = sorted(path.stem for path in launches.CONFIGS.glob("*.yaml"))
    names = [name for name in names if name not in launches.SINGLE_PROCESS_FILES and name != launches.REFERENCE]
    adapting, left_out = (("qlora", "lora"), []) if cases.on_gpu else (("qlora",), sorted({*names} - {*FILES_ON_CPU}))
    names = [name for name in names if name not in left_out]
    runs = [("full", name) for name in names]
    adapters = [name for name in names if name not in launches.MODEL_PARALLEL_FILES]
    runs += [(method, name) for method in adapting for name in adapters]
    reference = Once(functools.partial(result_of, cases, gpus))
    single = "single_gpu" if cases.on_gpu else launches.SINGLE
    cases.case("ddp, full, against one process", lambda: beside(cases, reference, ("full", "ddp"), ("full", single)))
    cases.case("ddp at half the batch differs", lambda: must_differ(cases, gpus, reference))
    for method in adapting:
        cases.case(f"ddp, {method}", lambda m=method: ran(reference(m, "ddp")))
    cases.case("one process, pretraining", lambda: ran(reference("pretrain", single)))
    # One more than can run at once, since the compiler needs no GPU.
    with ThreadPoolExecutor(1 + gpus.count // 2 if cases.on_gpu else 1) as pool:
        pool.submit(cases.case, "DeepSpeed's operations for the host are compiled", compiled)
        for method, name in runs:
            is_cut = name in launches.MODEL_PARALLEL_FILES
            against = ("pretrain", single) if is_cut else (method, "ddp")
            what = ("pretrain" if is_cut else method, name)
            label = f"{name}, {what[0]}, against {'one process' if is_cut else 'ddp'}"
            pool.submit(cases.case, label, functools.partial(beside, cases, reference, what, against))
    if left_out:
        cases.case(", ".join(left_out), functools.partial(lacks, "on a CPU: make test, docs/parity.md"))


def beside(cases: Cases, result: Any, what: tuple[str, str], against: tuple[str, str]) -> str:
    """Compare losses and weights of two launches."""
    difference = launches.compare(result(*what), result(*against))
    loss, weight = TOLERANCE[cases.device]
    found = f"losses {difference.loss:.1e}, weights {difference.weight:.1e} apart"
    return expect(difference.loss <= loss and difference.weight <= weight, found)


def must_differ(cases: Cases, gpus: Gpus, result: Any) -> str:
    """Check that the comparison detects what a wrong accumulation would look like."""
    wrong = result_of(cases, gpus, "full", "ddp", global_batch_size=launches.GLOBAL_BATCH_SIZE // 2)
    difference = launches.compare(wrong, result("full", "ddp"))
    return expect(difference.loss > 5 * TOLERANCE[cases.device][0], f"losses {difference.loss:.1e} apart")


def compiled() -> str:
    """Compile DeepSpeed's operators up front, for minutes at first: offloading launches would wait for each other."""
    code = "from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder\n"
    code += "CPUAdamBuilder().load(verbose=False)\nAsyncIOBuilder().load(verbose=False)"
    began, own = time.monotonic(), {} if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else {"DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **own})
    if done.returncode:
        raise Wrong((done.stderr.strip().splitlines() or ["no output"])[-1][:240])
    return f"{time.monotonic() - began:.0f} s"


def ran(result: launches.Result) -> str:
    """Describe a run that is only a reference for others."""
    return f"{len(result.losses)} steps, loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}"


def result_of(
    cases: Cases, gpus: Gpus, method: str, name: str, *, global_batch_size: int = launches.GLOBAL_BATCH_SIZE
) -> launches.Result:
    """Launch the unmodified file; several nodes become as many launches on this machine, each with its own GPUs."""
    file = read_launch_file(launches.CONFIGS / f"{name}.yaml")
    nodes = int(file.values.get("num_machines") or 1)
    processes = nodes if nodes > 1 else int(file.values.get("num_processes") or 1)
    if cases.on_gpu and processes > gpus.count:
        raise Needs(f"needs {processes} GPUs")
    folder = cases.folder / f"{name}_{method}_{global_batch_size}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    flags = run_flags(cases, method, global_batch_size) | EXTRA_FLAGS.get(name, {}) | {"output_dir": folder / "out"}
    recipe = REPOSITORY / "recipes" / ("pretrain.py" if method == "pretrain" else "sft.py")
    with gpus.taken(processes if cases.on_gpu else 0) as mine:
        commands = [[*start, str(recipe), *words(flags)] for start in launches.launch_commands(name, folder)]
        run_together(commands, folder, mine)
    return launches._read_result(folder / "out")


def run_flags(cases: Cases, method: str, global_batch_size: int) -> dict[str, object]:
    """Flags for fp32 without dropout, with a learning rate that changes weights by a few percent."""
    flags: dict[str, object] = {
        "model_name_or_path": cases.folder / "model_tiny", "precision": "fp32", "max_steps": launches.NUM_STEPS,
        "learning_rate": 1e-3, "max_length": 64, "logging_steps": 1, "global_batch_size": global_batch_size,
        "per_device_train_batch_size": 1,
    }  # fmt: skip
    documents = cases.folder / "documents.jsonl"
    if method == "pretrain":
        return flags | {"data": documents, "save_steps": 0, "sample_tokens": 0, "dataloader_num_workers": 0}
    return flags | {
        "dataset_name": documents, "method": method, "lora_dropout": 0, "packing": False, "save_strategy": "no",
        "exact_match_samples": 0, "plan": "off",
    }  # fmt: skip


def environment(gpus: list[str]) -> dict[str, str]:
    """Environment of a launch on `gpus`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def run_together(commands: list[list[str]], folder: Path, gpus: list[str]) -> None:
    """Run all commands at once until all succeed; those that take too long are killed with their ranks."""
    share = len(gpus) // len(commands)
    started = []
    for index, command in enumerate(commands):
        with (folder / f"launch_{index}.log").open("wb") as log:
            own = environment(gpus[index * share : (index + 1) * share])
            started.append(
                subprocess.Popen(
                    command, cwd=REPOSITORY, env=own, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )  # fmt: skip
    deadline = time.monotonic() + LAUNCH_SECONDS
    try:
        statuses = [process.wait(max(0.1, deadline - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"not finished in {LAUNCH_SECONDS:.0f} s") from error
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if any(statuses):
        from accel_scale.rehearsing.rehearse import error_lines

        said = [
            line for path in sorted(folder.glob("*.log")) for line in error_lines(path.read_text(errors="replace"))
        ]
        raise Wrong(f"status {max(statuses, key=abs)}: {said[0][:240] if said else 'no output'}")


def hang(cases: Cases) -> None:
    """Run two ranks under DDP, of which one stops after some steps."""
    written_model(cases.folder, "tiny", "cpu")
    written_documents(cases.folder, 60)
    hung, dead = r"rank 1 has not reached \w+ of step \d+( \([a-z ]+\))?", r"rank\s*: 1 |rank 1\b|local_rank: 1"
    cases.case("a rank that hangs", lambda: stopped(cases, "hung", signal.SIGALRM, hung))
    cases.case("a rank that dies", lambda: stopped(cases, "dead", signal.SIGKILL, dead))


def stopped(cases: Cases, name: str, how: signal.Signals, pattern: str) -> str:
    """Launch, send the signal to rank 1 once it trains, and check the output of the others and the launcher."""
    folder = cases.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    flags = run_flags(cases, "full", launches.GLOBAL_BATCH_SIZE)
    flags |= {"max_steps": 100_000, "collective_timeout": f"{HANG_SECONDS}s", "output_dir": folder / "out"}
    [start] = launches.launch_commands("ddp", folder)
    script = Path(__file__).with_name("rank_run.py")
    gpus = Gpus(cases.num_gpus)
    with gpus.taken(2 if cases.on_gpu else 0) as mine, (folder / "launch.log").open("wb") as log:
        process = subprocess.Popen(
            [*start, str(script), str(folder), *words(flags)], cwd=REPOSITORY, env=environment(mine),
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for_steps(process, folder)
            os.kill(int((folder / "rank_1").read_text()), how)
            began = time.monotonic()
            status = process.wait(90)
        except subprocess.TimeoutExpired as error:
            raise Wrong("the launch had not ended 90 s later") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    said = re.search(pattern, (folder / "launch.log").read_text(errors="replace"))
    found = f"status {status} after {time.monotonic() - began:.0f} s: {said.group().strip() if said else 'not named'}"
    return expect(status != 0 and said is not None, found)


def wait_for_steps(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until some steps are in the metrics log."""
    path, deadline = folder / "out" / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Wrong(f"ended with {process.returncode} before training")
        if path.is_file() and len(path.read_text().splitlines()) >= 3:
            return
        time.sleep(0.05)
    raise Wrong("did not come to its third step in 90 s")
