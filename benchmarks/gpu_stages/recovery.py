"""Stages `out_of_memory` and `resume`: runs interrupted by lack of memory or by a kill."""

from __future__ import annotations

import functools
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from gpu_stages.box import Cases, Wrong, expect
from gpu_stages.inputs import SHAPES, written_documents, written_model
from gpu_stages.recipe import REPOSITORY, furthest, train, words

sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "tests" / "distributed")]

import sft_soak  # noqa: E402
from memory_recovery_run import plant  # noqa: E402

# Half passes add the same losses in a different order.
TOLERANCE = {"cuda": 5e-3, "cpu": 1e-5}
_STEPS, _KILLS = 12, 2


def out_of_memory(cases: Cases) -> None:
    """Run out of memory in a pass, which is retried in halves, and in the first optimizer step, which ends the run."""
    cases.case("in the pass", functools.partial(in_the_pass, cases))
    cases.case("in the optimizer's step", functools.partial(in_the_step, cases))


def in_the_pass(cases: Cases) -> str:
    """Compare losses with less memory than needed (on a CPU, a layer that fails in large passes) to a normal run."""
    micro_batch, length = (16, 1024) if cases.on_gpu else (4, 128)
    flags: dict[str, object] = {
        "model_name_or_path": written_model(cases.folder, "0.5B" if cases.on_gpu else "tiny", cases.device),
        "dataset_name": written_documents(cases.folder, 2000 if cases.on_gpu else 80),
        "method": "lora", "checkpointing_policy": "none", "max_length": length, "max_steps": 3, "plan": "off",
        "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 1,
        # CPUs with bf16 would choose it, and its rounding would hide a wrong sum.
        **({} if cases.on_gpu else {"precision": "fp32"}),
    }  # fmt: skip
    undisturbed = train(cases.folder / "undisturbed", **flags)
    if cases.on_gpu:
        cap = int(0.8 * undisturbed["peak_device_bytes"]["allocated_bytes"])
        try:
            disturbed = train(cases.folder / "disturbed", **flags, device_memory=f"{cap // 2**20}MiB")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        with planted(max_tokens=micro_batch * length * 3 // 4):
            disturbed = train(cases.folder / "disturbed", **flags)
    recovery = disturbed["memory_recovery"]
    if not recovery:
        raise Wrong("memory did not run out: nothing was tried")
    gap = furthest(disturbed["losses"], undisturbed["losses"])
    found = f"step {recovery['recovered_steps'][0]} taken again, {recovery['passes_per_micro_batch']} passes for one"
    return expect(gap <= TOLERANCE[cases.device], f"{found}; losses {gap:.1e} from the undisturbed run's")


@contextmanager
def planted(max_tokens: int) -> Iterator[None]:
    """Make the second half of a layer fail in backward passes of more than `max_tokens`."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    kept = LlamaMLP.forward
    plant("backward", 0, max_tokens)
    try:
        yield
    finally:
        LlamaMLP.forward = kept


def in_the_step(cases: Cases) -> str:
    """Leave room for weights, gradients and half of AdamW's states: one line names the flags, with its own status."""
    from accel_scale.facts.exit_statuses import OUT_OF_MEMORY_STATUS

    size = "0.5B" if cases.on_gpu else "tiny"
    flags: dict[str, object] = {
        "model_name_or_path": written_model(cases.folder, size, cases.device),
        "dataset_name": written_documents(cases.folder, 80),
        "max_length": 128, "per_device_train_batch_size": 1, "max_steps": 2, "checkpointing_policy": "full",
        "gradient_accumulation_steps": 1, "plan": "off", "output_dir": cases.folder / "step",
    }  # fmt: skip
    shutil.rmtree(cases.folder / "step", ignore_errors=True)
    if cases.on_gpu:
        flags["device_memory"] = f"{3 * 4 * num_parameters(size) // 2**20}MiB"
        command = [str(REPOSITORY / "recipes" / "sft.py")]
    else:
        command = [str(REPOSITORY / "tests" / "distributed" / "memory_recovery_run.py"), "step", "0", "0", "sft.py"]
    done = subprocess.run(
        [sys.executable, *command, *words(flags)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stderr.splitlines() if "memory ran out" in line]
    found = f"status {done.returncode}: {lines[0] if lines else done.stderr.strip()[-200:]}"
    is_right = done.returncode == OUT_OF_MEMORY_STATUS and len(lines) == 1 and "optimizer's step 1" in lines[0]
    return expect(is_right, re.sub(r"CUDA out of memory.*?\)+\. Fix", "CUDA out of memory …). Fix", found))


def num_parameters(size: str) -> int:
    """Parameters of a Llama with tied embeddings, without norms."""
    hidden, layers, heads, kv_heads, feed_forward, vocabulary, _ = SHAPES[size]
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    return int(layers * (attention + 3 * hidden * feed_forward) + vocabulary * hidden)


class DirectJob(sft_soak.Job):
    """The soak test's run without a launcher: a single process that a kill ends completely."""

    def command(self) -> list[str]:
        launched = super().command()
        return [self.python, *launched[launched.index(str(REPOSITORY / "recipes" / "sft.py")) :]]

    def kill(self, process: subprocess.Popen[bytes], known: Sequence[psutil.Process] = ()) -> None:
        super().kill(process, known)
        time.sleep(0.5)  # a process forked for the killed one ends a moment later


def resume(cases: Cases) -> None:
    """Two undisturbed runs, then one that is killed once between saves and once during a save."""
    inputs, extra = cases.folder / "inputs", ["--save_total_limit", "2"]
    if not inputs.is_dir():
        sft_soak.make_inputs(inputs)
    if cases.on_gpu:  # kernels that add in order of thread arrival would differ between runs
        extra += ["--full_determinism", "true"]
    make = functools.partial(make_job, cases, inputs, extra)
    cases.case("two runs of the same command", functools.partial(twice, make))
    cases.case(f"killed {_KILLS} times and resumed", functools.partial(killed, make))


def make_job(cases: Cases, inputs: Path, extra: list[str], name: str, *, anew: bool = True) -> DirectJob:
    """A run in its own folder, which is emptied first unless its result is needed."""
    job = DirectJob("single", cases.folder / name, inputs, _STEPS, sys.executable, family, extra=extra)
    if anew:
        shutil.rmtree(job.folder, ignore_errors=True)
    return job


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants."""
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def twice(make: Any) -> str:
    """Check that the device itself reproduces the same bits."""
    jobs = [make("first"), make("second")]
    for job in jobs:
        job.finish()
    return same_bits(*jobs)


def killed(make: Any) -> str:
    """Compare a run with `kill -9`, every second time during checkpoint writing, with the first run."""
    whole, cut = make("first", anew=False), make("cut")
    moments = []
    for number in range(_KILLS):
        moment = sft_soak.kill_at_random(cut, random.Random(number), 1.0, in_save=number % 2 == 1)
        moments.append(moment)
        if moment == "had ended":
            break
    cut.finish()
    return f"{' and '.join(moments)}: {same_bits(whole, cut)}"


def same_bits(first: DirectJob, second: DirectJob) -> str:
    """Compare every logged figure and every weight."""
    found = sft_soak.differences(first.folder, second.folder)
    num_steps = len(sft_soak.metrics(first.folder))
    return expect(not found, found[0] if found else f"{num_steps} steps and all weights the same, bit for bit")
