"""`CheckpointManager` in real launches of every strategy: the same numbers after a resume on any number of ranks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import parity
import pytest

from accel_scale.facts.exit_statuses import EXIT_STOPPED, FULL_DISK_STATUS
from accel_scale.training.checkpoints.manifest import changed_files, read_manifest

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("checkpoint_run.py"))
SHARDED = ["--fsdp_state_dict_type", "SHARDED_STATE_DICT"]
VARIANTS = {
    "ddp": ("ddp", []),
    "fsdp2": ("fsdp2", []),
    "fsdp2 sharded": ("fsdp2", SHARDED),
    "zero1": ("zero1", []),
    "zero2": ("zero2", []),
    "zero3": ("zero3", []),
}
# The other ZeRO stages write and read with the same code.
LONG = ("zero1", "zero3")
EVERY = [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in VARIANTS]
SAVED_AT, NUM_STEPS = 3, 6
# Room for one and a half checkpoints of `checkpoint_run.py`, in pages of a tmpfs.
DISK_KILOBYTES = {"fsdp2 sharded": 920, "zero2": 720}


def command(name: str, num_processes: int, *arguments: str) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", str(parity.CONFIGS / f"{name}.yaml"), "--mixed_precision", "no"]
    launch += ["--num_processes", str(num_processes), "--main_process_port", "0"]
    return [*launch, *arguments]


@dataclass
class Run:
    """The report and the log of one run."""

    report: dict
    log: str

    @property
    def losses(self) -> dict[int, float]:
        return {int(step): loss for step, loss in self.report["losses"].items()}

    @property
    def draws(self) -> dict[int, list[float]]:
        return {int(step): draws for step, draws in self.report["draws"].items()}


@functools.cache
def outcome(variant: str) -> tuple[Path, dict[str, Run]]:
    """One launch that makes all runs, on two, one and four ranks."""
    name, changes = VARIANTS[variant]
    folder = parity.folder_until_exit("checkpoints-")

    def run(label: str, num_processes: int, *argv: str) -> dict:
        return {
            "argv": ["--report", str(folder / f"{label}.json"), "--num_steps", str(NUM_STEPS), *argv],
            "log": str(folder / f"{label}.log"),
            "num_processes": num_processes,
        }

    first, second = str(folder / "with dropout"), str(folder / "without")
    runs = [
        run("whole", 2, "--output_dir", first, "--save_at", str(SAVED_AT), "--dropout", "0.1"),
        run("resumed", 2, "--output_dir", first, "--dropout", "0.1"),
        run("reference", 2, "--output_dir", second, "--save_at", str(SAVED_AT)),
        run("one", 1, "--output_dir", str(folder / "one"), "--resume", f"{second}/checkpoint-{SAVED_AT}"),
        run("four", 4, "--output_dir", str(folder / "four"), "--resume", f"{second}/checkpoint-{SAVED_AT}"),
    ]
    if not name.startswith("zero"):
        asynchronous = ["--save_at", str(SAVED_AT), "--asynchronous"]
        runs += [run("asynchronous", 2, "--output_dir", str(folder / "asynchronous"), *asynchronous)]
    if name == "fsdp2":
        at_start = ["--output_dir", str(folder / "start"), "--dropout", "0.1"]
        other = "FULL_STATE_DICT" if changes else "SHARDED_STATE_DICT"
        resume = [
            "--resume",
            f"{second}/checkpoint-{SAVED_AT}",
            "--output_dir",
            str(folder / "other"),
            "--layout",
            other,
        ]
        runs += [run("other layout", 2, *resume, "--num_steps", "7", "--save_at", "7")]
        runs += [run("saved first", 2, *at_start, "--save_at", "0"), run("from the first", 2, *at_start)]
    (folder / "runs.json").write_text(json.dumps(runs))
    parity._run_all([command(name, 1, *changes, SCRIPT, "--runs", str(folder / "runs.json"))], folder)
    labels = [Path(run["log"]).stem for run in runs]
    return folder, {
        label: Run(json.loads((folder / f"{label}.json").read_text()), (folder / f"{label}.log.0").read_text())
        for label in labels
    }


@pytest.mark.parametrize("variant", EVERY)
def test_going_on_with_the_same_ranks_is_bitwise(variant):
    _, runs = outcome(variant)
    whole, resumed = runs["whole"], runs["resumed"]
    assert resumed.report["resumed"] == SAVED_AT
    assert resumed.report["state"] == {"rows": 4 * SAVED_AT}
    assert list(resumed.losses) == [4, 5, 6]
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > SAVED_AT}
    assert resumed.draws == {step: draws for step, draws in whole.draws.items() if step > SAVED_AT}
    assert len(set(resumed.draws[4])) == 6  # different on every rank
    assert resumed.report["counter"] == whole.report["counter"] == [1, 2, 3, 4, 5, 6]
    assert resumed.report["learning_rate"] == whole.report["learning_rate"]


@pytest.mark.parametrize("label", ["one", "four"])
@pytest.mark.parametrize("variant", EVERY)
def test_going_on_with_other_ranks(variant, label):
    _, runs = outcome(variant)
    run, reference = runs[label], runs["reference"]
    assert list(run.losses) == [4, 5, 6]
    for step, loss in run.losses.items():
        assert loss == pytest.approx(reference.losses[step], abs=2e-6)
    assert run.report["counter"] == [1, 2, 3, 4, 5, 6]
    assert run.report["learning_rate"] == reference.report["learning_rate"]
    now = {"one": 1, "four": 4}[label]
    assert f"(step 3, written by 2 ranks and now on {now})" in run.log
    # Known ranks continue their random numbers; new ranks draw their own.
    for step in (4, 5, 6):
        assert run.draws[step][:3] == reference.draws[step][:3]
        assert len(set(run.draws[step])) == 3 * now


@pytest.mark.parametrize("variant", ["fsdp2", "fsdp2 sharded"])
def test_a_checkpoint_before_the_first_step_changes_nothing(variant):
    """torch creates an optimizer state where there is none yet."""
    _, runs = outcome(variant)
    assert runs["from the first"].report["resumed"] == 0
    assert runs["saved first"].losses == runs["whole"].losses
    assert runs["from the first"].losses == runs["whole"].losses


@pytest.mark.parametrize("variant", ["fsdp2", "fsdp2 sharded"])
def test_the_layout_may_change(variant):
    folder, runs = outcome(variant)
    after = {step: loss for step, loss in runs["reference"].losses.items() if step > SAVED_AT}
    assert {step: runs["other layout"].losses[step] for step in after} == after
    written = read_manifest(folder / "without" / f"checkpoint-{SAVED_AT}").layout
    assert {written, read_manifest(folder / "other" / "checkpoint-7").layout} == {"FULL_STATE_DICT", SHARDED[1]}


@pytest.mark.parametrize("variant", ["ddp", "fsdp2", "fsdp2 sharded"])
def test_asynchronous_writes_the_same_bytes(variant):
    folder, _ = outcome(variant)
    written = {}
    for name in ("without", "asynchronous"):
        root = folder / name / f"checkpoint-{SAVED_AT}"
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        # These contain an identity that torch gives to every collection of shards.
        written[name] = {k: v for k, v in files.items() if not k.endswith((".metadata", "manifest.json"))}
    assert written["without"] == written["asynchronous"]


def start(name: str, folder: Path, *arguments: str) -> subprocess.Popen:
    """Start a launch of two processes whose output goes to ``log``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command(name, 2, *arguments, "--output_dir", str(folder / "run")),
            cwd=parity.REPOSITORY,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def until(condition, launcher: subprocess.Popen, folder: Path, seconds: float = 120.0):
    """Wait until `condition` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        if launcher.poll() is not None:
            break
        time.sleep(0.05)
    os.killpg(launcher.pid, signal.SIGKILL)
    raise AssertionError((folder / "log").read_text(errors="replace")[-3000:])


def pid_of_second_rank(folder: Path) -> int | None:
    match = re.search(r"rank 1 pid (\d+) step 2$", (folder / "log").read_text(errors="replace"), re.MULTILINE)
    return int(match.group(1)) if match else None


def finished(launcher: subprocess.Popen, folder: Path) -> int:
    """The launcher's exit status; kills whatever is left of the launch."""
    try:
        return launcher.wait(90)
    except subprocess.TimeoutExpired:
        raise AssertionError((folder / "log").read_text(errors="replace")[-3000:]) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def test_a_schedule_that_counts_ranks_is_refused_on_others(tmp_path):
    """This is Accelerate's default; the schedule would continue at another speed."""
    folder, _ = outcome("ddp")
    arguments = ["--resume", str(folder / "without" / f"checkpoint-{SAVED_AT}"), "--schedule_counts_ranks"]
    run = [sys.executable, SCRIPT, "--output_dir", str(tmp_path / "run"), *arguments]
    process = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 2, process.stderr
    assert "the schedule counts 2 at every step of checkpoint-3 and would now count 1" in process.stderr


@pytest.mark.parametrize(
    ("variant", "number", "to_launcher"),
    [("ddp", signal.SIGTERM, True), ("zero2", signal.SIGUSR1, False)],
    ids=["SIGTERM to the launcher", "SIGUSR1 to a worker"],
)
def test_a_signal_ends_in_a_checkpoint(tmp_path, variant, number, to_launcher):
    launcher = start(VARIANTS[variant][0], tmp_path, *VARIANTS[variant][1], SCRIPT, "--num_steps", "1000000")
    worker = until(lambda: pid_of_second_rank(tmp_path), launcher, tmp_path)
    os.kill(launcher.pid if to_launcher else worker, number)
    assert finished(launcher, tmp_path) == 1  # torchrun has no other status for failed or stopped workers
    log = (tmp_path / "log").read_text(errors="replace")
    assert log.count(f"leaving with {EXIT_STOPPED}") == 2
    if not to_launcher:
        assert re.search(rf"exitcode\s*: {EXIT_STOPPED}", log)
    (folder,) = (tmp_path / "run").iterdir()
    manifest = read_manifest(folder)
    steps = {int(step) for step in re.findall(r"step (\d+)$", log, re.MULTILINE)}
    assert manifest.step == max(steps)  # saved at the step after which all ranks knew
    assert manifest.stopped_by == number.name


def test_killed_in_the_middle_of_a_save(tmp_path):
    """A rank of FSDP2 dies while the shards of the second checkpoint are being written."""
    name, changes = VARIANTS["fsdp2 sharded"]
    arguments = [*changes, SCRIPT, "--save_every", "2", "--num_steps", "6", "--hidden_size", "256"]
    killed = ["--killed_at", ".partial/checkpoint-4/optimizer_0/__1_0.distcp"]
    assert finished(start(name, tmp_path, *arguments, *killed), tmp_path) == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".partial", "checkpoint-2"]
    report = tmp_path / "report.json"
    assert finished(start(name, tmp_path, *arguments, "--report", str(report)), tmp_path) == 0
    assert json.loads(report.read_text())["resumed"] == 2
    assert "run: removed unfinished checkpoint-4" in (tmp_path / "log").read_text(errors="replace")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("variant", ["fsdp2 sharded", "zero2"])
def test_a_full_disk_costs_the_new_checkpoint_only(tmp_path, variant):
    """On a real filesystem with room for one and a half checkpoints: all ranks learn of it, none waits for another."""
    disk = tmp_path / "run"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, b"size=%dk" % DISK_KILOBYTES[variant]) != 0:
        pytest.skip("only root mounts a small filesystem")
    try:
        name, changes = VARIANTS[variant]
        launcher = start(name, tmp_path, *changes, SCRIPT, "--save_every", "2", "--num_steps", "5")
        assert finished(launcher, tmp_path) == 1
        log = (tmp_path / "log").read_text(errors="replace")
        assert log.count("warning: checkpoint-4 was not saved: the disk is full") == 1
        assert len(re.findall(r"^rank \d pid \d+ step 5$", log, re.MULTILINE)) == 2  # training went on
        assert re.search(rf"exitcode\s*: {FULL_DISK_STATUS}", log)
        assert [path.name for path in disk.iterdir()] == ["checkpoint-2"]
        manifest = read_manifest(disk / "checkpoint-2")
        assert changed_files(disk / "checkpoint-2", manifest, manifest.files) == []
    finally:
        libc.umount2(str(disk).encode(), 2)
