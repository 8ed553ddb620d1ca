"""Rehearse a launch: run it in small on CPU processes, save, resume in a new launch, reload, and compare."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_scale.errors import first_line
from accel_scale.recipe_specs.spec import CHECKPOINT_STEP, NUM_STEPS
from accel_scale.rehearsing.plan import CheckFailed, Rehearsal
from accel_scale.rehearsing.results import RunResults, final_folder, read_results

# The same processes add in the same order; the tolerance covers a CPU Adam that vectorises by alignment.
RESUME_TOLERANCE = 1e-5
# In DeepSpeed 0.19.8, DeepSpeedEngine._load_checkpoint with NVMe copies the swap files back and loads nothing else.
NVME_REASON = (
    "DeepSpeed does not restore optimizer states that it keeps on NVMe, so the recipe refuses to resume them. Offload "
    "the optimizer to the CPU (device: cpu) if this run must be able to resume."
)
_ERROR_LINE = re.compile(r"^(\[rank\d+\]: ?)?([\w.]+: error: .+|[\w.]*(Error|Exception|Interrupt|Exit)\b.*)$")
# Launcher messages about a child process that has already reported its own error.
_ECHOES = ("ChildFailedError", "CalledProcessError")


@dataclass
class Check:
    """One line of the result.

    Attributes:
        outcome: ``passed``, ``failed``, ``not offered`` (unsupported by the engine, so the recipe refuses) or ``not
            reached`` (an earlier one failed).
        details: What was observed, on one line; on failure the last lines of the error.
    """

    name: str
    outcome: str = "not reached"
    details: str = ""
    seconds: float = 0.0


class NotOffered(Exception):
    """The recipe refuses what a check needs because the engine does not support it; the message is the reason."""


@dataclass
class RehearsalReport:
    """All checks of one rehearsal, in order."""

    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if every check that the launch supports was run and passed."""
        return all(check.outcome in ("passed", "not offered") for check in self.checks)


def run_rehearsal(
    rehearsal: Rehearsal,
    work: Path,
    *,
    timeout_seconds: float,
    on_start: Callable[[str], None] = lambda name: None,
) -> RehearsalReport:
    """Launch, resume and reload; checks after a failed one are reported as not reached.

    Args:
        work: Folder for outputs and logs.
        timeout_seconds: Limit for each launch, after which it counts as hanging.
        on_start: Called with the name of each check as it begins.
    """
    steps: dict[str, Callable[[], str]] = {
        "launch": lambda: _launch(rehearsal, work, "uninterrupted", timeout_seconds=timeout_seconds),
        "processes": lambda: _check_processes(rehearsal, work),
        "losses": lambda: _check_losses(work),
        "checkpoint": lambda: _check_checkpoint(rehearsal, work),
        "resume": lambda: _check_resume(rehearsal, work, timeout_seconds=timeout_seconds),
        "reload": lambda: _check_reload(rehearsal, work),
    }
    report = RehearsalReport([Check(name) for name in steps])
    for check in report.checks:
        on_start(check.name)
        started = time.perf_counter()
        try:
            check.details, check.outcome = steps[check.name](), "passed"
        except NotOffered as reason:
            check.details, check.outcome = str(reason), "not offered"
        except CheckFailed as failure:
            check.details, check.outcome = str(failure), "failed"
        check.seconds = time.perf_counter() - started
        if check.outcome == "failed":
            break
    return report


def _launch(
    rehearsal: Rehearsal, work: Path, name: str, *, timeout_seconds: float, resume_from: Path | None = None
) -> str:
    """Run one `accelerate launch`; its whole output goes to ``name.log``."""
    command = rehearsal.command(work / name, resume_from=resume_from)
    # Hide all accelerators: the launch is rehearsed on the CPU even if there is one.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "", "HF_HUB_OFFLINE": "1"}
    log = work / f"{name}.log"
    with log.open("wb") as output, _running(command, {**os.environ, **hidden}, output) as process:
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"no end after {timeout_seconds:.0f} s; the last lines are in {log}") from None
    if status != 0:
        raise CheckFailed("\n".join(error_lines(log.read_text(errors="replace"))))
    return f"{NUM_STEPS} steps on {rehearsal.num_processes} CPU process{'es' * (rehearsal.num_processes > 1)}"


@contextmanager
def _running(command: list[str], environment: dict[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own process group that does not outlive the block."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def error_lines(log: str, *, max_lines: int = 3) -> list[str]:
    """The lines of `log` that say what went wrong: the first distinct errors, else the last lines."""
    found: list[str] = []
    for line in log.splitlines():
        match = _ERROR_LINE.match(line.strip())
        if match and not any(echo in line for echo in _ECHOES) and match.group(2) not in found:
            found.append(match.group(2))
    return found[:max_lines] or [line for line in log.splitlines() if line.strip()][-max_lines:] or ["no output"]


def _results(work: Path, name: str) -> RunResults:
    found = read_results(work / name)
    if found is None:
        raise CheckFailed("the recipe ended without writing run_summary.json or a Trainer's checkpoint")
    return found


def _check_processes(rehearsal: Rehearsal, work: Path) -> str:
    """Check that the processes formed one run; separate runs would all write to the same folder and look fine."""
    world_size = _results(work, "uninterrupted").world_size
    if world_size != rehearsal.num_processes:
        raise CheckFailed(f"{rehearsal.num_processes} processes were started and the run knew of {world_size}")
    return f"one run of {world_size}" if world_size > 1 else "one run of one, as the launch file says"


def _check_losses(work: Path) -> str:
    losses = _results(work, "uninterrupted").losses
    if len(losses) != NUM_STEPS or not all(math.isfinite(loss) for loss in losses):
        raise CheckFailed(f"{NUM_STEPS} finite losses were expected: {losses}")
    return f"finite, {losses[0]:.4f} → {losses[-1]:.4f}"


def _check_checkpoint(rehearsal: Rehearsal, work: Path) -> str:
    """Check that the checkpoint to resume from is complete, and report what the recipe found when reading it back."""
    folder = work / "uninterrupted" / rehearsal.spec.rehearsal.checkpoint
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    if rehearsal.spec.rehearsal.complete_file not in names:
        raise CheckFailed(f"{folder.name} was not written, or is not complete")
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    text = f"{len(names)} files, {num_bytes / 2**20:.1f} MiB"
    verified = _results(work, "uninterrupted").verified
    return text + (f"; {verified[0]} tensors read back, max |Δ| {verified[1]:g}" if verified else "")


def _check_resume(rehearsal: Rehearsal, work: Path, *, timeout_seconds: float) -> str:
    """Compare a new launch from the checkpoint with the steps that the first launch took after it."""
    if rehearsal.optimizer_on_nvme:
        raise NotOffered(NVME_REASON)
    if rehearsal.spec.resume_flag is None:
        raise NotOffered("the recipe declares no flag that resumes.")
    losses = _results(work, "uninterrupted").losses
    checkpoint = work / "uninterrupted" / rehearsal.spec.rehearsal.checkpoint
    _launch(rehearsal, work, "resumed", resume_from=checkpoint, timeout_seconds=timeout_seconds)
    # A resumed run's history starts with the losses stored in the checkpoint.
    expected = losses[CHECKPOINT_STEP:]
    resumed = _results(work, "resumed").losses[-len(expected) :]
    worst = furthest(resumed, expected)
    steps = f"steps {CHECKPOINT_STEP + 1} to {NUM_STEPS}"
    if not worst <= RESUME_TOLERANCE:
        raise CheckFailed(f"{steps} gave {resumed} after resuming and {expected} without a break")
    return f"{steps}: same losses" + (f" to {worst:.0e}" if worst else ", to the last bit")


def furthest(values: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; absolute where 0 is expected, as for the loss of a policy gradient."""
    return max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(values, expected, strict=True))


def _check_reload(rehearsal: Rehearsal, work: Path) -> str:
    from accel_scale.rehearsing.reload import compare_final_folders

    resumes = rehearsal.spec.resume_flag is not None and not rehearsal.optimizer_on_nvme
    try:
        return compare_final_folders(
            start=rehearsal.start,
            uninterrupted=final_folder(work / "uninterrupted"),
            resumed=final_folder(work / "resumed") if resumes else None,
        )
    except CheckFailed:
        raise
    except Exception as error:  # raised by the model's own code
        raise CheckFailed(f"{type(error).__name__}: {first_line(error)}") from error
