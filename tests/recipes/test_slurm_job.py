"""A fine-tuning job under Slurm's script, with stand-ins for Slurm's commands: saved at the time limit, requeued,
and finished with the weights of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from accel_scale.cli.main import main

# srun starts the task and forwards SIGUSR1 to it, as Slurm's does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@" &
task=$!
trap 'kill -USR1 $task' USR1
while true; do
  wait $task; status=$?
  if [ $status -gt 128 ] && kill -0 $task 2>/dev/null; then continue; fi
  exit $status
done
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node1; else echo "$*" >>"$CALLS"; fi
"""
# The real launcher; its worker starts from a warm process.
ACCELERATE = """#!{real_python}
import sys
sys.executable = {python!r}
from accelerate.commands.accelerate_cli import main
main()
"""
STEPS = 24


def test_a_job_that_is_stopped_at_its_time_limit_loses_nothing(
    sft, shared_data, small_gsm8k, repository, real_python, tmp_path, monkeypatch
):
    monkeypatch.chdir(repository)
    undisturbed = sft(f"--max_steps {STEPS} --lr_scheduler_type cosine")["out"]
    out = tmp_path / "job"
    words = ["--model_name_or_path", str(shared_data / "stories260k"), "--dataset_name", str(small_gsm8k)]
    words += ["--columns", "prompt=question", "completion=answer", "--output_dir", str(out), "--max_length", "256"]
    words += ["--per_device_train_batch_size", "2", "--logging_steps", "1", "--precision", "fp32"]
    words += ["--max_steps", str(STEPS), "--lr_scheduler_type", "cosine"]
    script = tmp_path / "job.sbatch"
    command = ["launch-script", "slurm", "--config_file", "accelerate_configs/cpu.yaml", "--output", str(script)]
    assert main([*command, "recipes/sft.py", *words]) == 0
    stubs = tmp_path / "bin"
    stubs.mkdir()
    accelerate = ACCELERATE.format(real_python=real_python, python=sys.executable)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("accelerate", accelerate)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "PYTHONPATH": str(repository),
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_NODEID": "0",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }

    def start(restarts: int) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(script)], env={**environment, "SLURM_RESTART_COUNT": str(restarts)},
            stdout=(tmp_path / "log").open("ab"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    job = start(0)
    wait_for_steps(out / "metrics.jsonl", 3, job, tmp_path / "log")
    job.send_signal(signal.SIGUSR1)  # --signal=B:USR1 sends it to the batch script alone
    assert job.wait(60) == 0
    log = (tmp_path / "log").read_text()
    assert (tmp_path / "calls").read_text() == "requeue 4321\n", log
    assert "after SIGUSR1; the same command continues from there" in log
    assert not (out / "model.safetensors").exists()
    job = start(1)
    assert job.wait(120) == 0, (tmp_path / "log").read_text()
    assert "resumed" in (tmp_path / "log").read_text().removeprefix(log)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, undisturbed))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def wait_for_steps(path: Path, count: int, job: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < count:
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
