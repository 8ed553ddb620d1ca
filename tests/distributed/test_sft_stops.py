"""A signal to the launcher of recipes/sft.py leaves a checkpoint and no process, under every strategy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accel_scale.training.checkpoints.folders import list_checkpoints

WARM_PYTHON = False  # these tests are about which process is whose parent
pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = {"single": 1, "ddp": 2, "fsdp2": 2, "zero2": 2, "zero3": 2}
# The signals that end a job, that a terminal sends, and that cannot be handled.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
SHORT = [("single", signal.SIGTERM), ("fsdp2", signal.SIGTERM)]
LONG = [(name, number) for name in RANKS for number in SIGNALS if (name, number) not in SHORT]
# After the launcher's end, on an otherwise idle machine.
SECONDS_LEFT = 5.0


def start(name: str, inputs: Path, out: Path) -> subprocess.Popen[bytes]:
    file = "cpu" if name == "single" else name
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    launch += ["--config_file", str(REPOSITORY / "accelerate_configs" / f"{file}.yaml")]
    launch += ["--num_processes", str(RANKS[name]), "--main_process_port", "0", str(REPOSITORY / "recipes" / "sft.py")]
    flags = {
        "model_name_or_path": inputs / "model", "dataset_name": inputs / "rows.jsonl", "max_length": 64,
        "per_device_train_batch_size": 1, "max_steps": 100_000, "logging_steps": 1, "save_strategy": "no",
        "precision": "fp32", "output_dir": out, "dataloader_num_workers": 1,
    }  # fmt: skip
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with open(log_of(out), "ab") as log:
        return subprocess.Popen(
            [*launch, *words], stdout=log, stderr=log, env=environment, cwd=REPOSITORY, start_new_session=True
        )


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


@pytest.mark.parametrize(("name", "number"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.soak) for case in LONG)])
def test_a_signal_to_the_launcher(inputs: Path, tmp_path: Path, name: str, number: signal.Signals) -> None:
    out = tmp_path / "out"
    launcher = start(name, inputs, out)
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 300
        while not (out / "metrics.jsonl").is_file() and time.monotonic() < deadline:
            assert launcher.poll() is None, log_of(out).read_text(errors="replace")
            time.sleep(0.05)
        family = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [process for process in family if "sft.py" in " ".join(process.cmdline())]
        assert len(ranks) >= RANKS[name], log_of(out).read_text(errors="replace")
        launcher.send_signal(number)
        launcher.wait(60)
        others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        _, left = psutil.wait_procs(family, timeout=SECONDS_LEFT * others)
        assert not left, [process.cmdline() for process in left]
        said = log_of(out).read_text(errors="replace")
        (found,), damaged = list_checkpoints(out)
        assert not damaged
        assert not (out / ".partial").exists()
        # A launcher that cannot pass its signal on, or is gone, counts as SIGTERM.
        stopped_by = found.manifest.stopped_by
        assert stopped_by in ("SIGTERM", number.name)
        line = f"saved {found.folder.name} after {stopped_by}; the same command continues from there"
        assert line in said
        assert '<span class="state stopped">' in (out / "report.html").read_text()
        deadline = time.monotonic() + SECONDS_LEFT * others
        while not said.rstrip().endswith(line) and time.monotonic() < deadline:  # repeated after the launcher's end
            time.sleep(0.1)
            said = log_of(out).read_text(errors="replace")
        assert said.rstrip().endswith(line) or number == signal.SIGKILL  # torch warns that the store is gone
    finally:
        for process in [psutil.Process(launcher.pid)] if launcher.poll() is None else []:
            family += [process, *process.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
