"""How launches end: the cause is the last line, and no worker outlives its launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

WARM_PYTHON = False  # these tests are about which process is whose parent
RUN = str(Path(__file__).with_name("ends_run.py"))
LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--num_processes", "1"],
    "accelerate, two": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
    "torchrun, two": ["-m", "torch.distributed.run", "--nproc_per_node", "2"],
}
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_LINES = Path(RUN).read_text(encoding="utf-8").splitlines()
CRASH_LINE = next(number for number, line in enumerate(_LINES, 1) if "no such thing" in line)
REFUSED = "ends_run.py: error: --flag: is wrong. Fix: fix it."


def command(real_python: str, launcher: str, *words: str) -> list[str]:
    own = LAUNCHERS[launcher]
    port = ["--main_process_port", "0"] if launcher == "accelerate, two" else []
    port = ["--master_port", "0"] if launcher.startswith("torchrun") else port
    return [real_python, *own, *port, RUN, *words]


@pytest.mark.parametrize(
    ("launcher", "mode", "last", "times"),
    [
        ("accelerate", "refuse", REFUSED, 2),
        ("accelerate, two", "refuse", REFUSED, 2),
        (
            "torchrun, two",
            "crash on the last rank",
            f"ends_run.py: error: KeyError at ends_run.py:{CRASH_LINE}: 'no such thing'",
            1,
        ),
    ],
)
def test_the_cause_is_the_last_line(real_python, repository, tmp_path, launcher, mode, last, times):
    done = subprocess.run(
        command(real_python, launcher, mode, str(tmp_path)),
        capture_output=True, text=True, cwd=repository, env={**os.environ, **ENVIRONMENT}, timeout=120,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[-1] == last, done.stderr
    assert done.returncode == 1
    assert lines.count(last) == times  # right away by one rank, and again after the launcher's report


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun, two"])
def test_ctrl_c_before_training_ends_with_how_to_go_on(real_python, repository, tmp_path, launcher):
    launched = subprocess.Popen(
        command(real_python, launcher, "before training", str(tmp_path)),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=repository,
        env={**os.environ, **ENVIRONMENT}, start_new_session=True,
    )  # fmt: skip
    pids = [launched.pid]
    try:
        pids += wait_for_pids(tmp_path, 2 if "two" in launcher else 1)
        os.killpg(launched.pid, signal.SIGINT)
        lines = [line for line in launched.communicate(timeout=60)[1].splitlines() if line.strip()]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    last = "ends_run.py: interrupted; the same command starts over, or continues from its last checkpoint."
    assert lines[-1] == last, lines
    assert lines.count(last) == 2  # right away, and again after the launcher's traceback


@pytest.mark.parametrize(
    ("launcher", "mode", "status", "last"),
    [
        ("accelerate", "refuse", -signal.SIGTERM, REFUSED),  # the launcher's report has the whole command line
        (
            "accelerate, two",
            "crash on the last rank",
            1,
            f"ends_run.py: error: KeyError at ends_run.py:{CRASH_LINE}: ",
        ),
    ],
)
def test_a_typed_credential_is_not_in_the_report(real_python, repository, tmp_path, launcher, mode, status, last):
    done = subprocess.run(
        command(real_python, launcher, mode, str(tmp_path), "--hub_token", "my secret"),
        capture_output=True, text=True, cwd=repository, env={**os.environ, **ENVIRONMENT}, timeout=120,
    )  # fmt: skip
    assert "secret" not in done.stdout + done.stderr
    assert done.returncode == status
    assert [line for line in done.stderr.splitlines() if line.strip()][-1].startswith(last)


@pytest.mark.parametrize(
    ("launcher", "number", "mode"),
    [
        ("accelerate", signal.SIGTERM, "stuck"),
        ("torchrun, two", signal.SIGKILL, "wait"),
    ],
)
def test_no_worker_outlives_its_launcher(real_python, repository, tmp_path, launcher, number, mode):
    launched = subprocess.Popen(
        command(real_python, launcher, mode, str(tmp_path)),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=repository,
        env={**os.environ, **ENVIRONMENT, "ACCEL_SCALE_ORPHAN_SECONDS": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        pids = wait_for_pids(tmp_path, 2 if "two" in launcher else 1)
        launched.send_signal(number)
        launched.wait(40)
        gone_by = time.monotonic() + 5
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < gone_by:
            time.sleep(0.05)
        assert not left
        if mode == "stuck":
            assert "could not stop within 1 s" in launched.stderr.read()
    finally:
        for pid in [launched.pid, *(pids if "pids" in dir() else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launched.stderr.close()


def wait_for_pids(folder: Path, num_ranks: int) -> list[int]:
    deadline = time.monotonic() + 90
    while len(files := list(folder.glob("*.pids"))) < num_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(word) for file in files for word in file.read_text().split()]


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
