"""Checkpoints of a plain Accelerate loop: published whole or not at all, checked before they are trusted.

    manager = CheckpointManager(accelerator, "runs/a", keep_last=2)
    manager.register("guard", guard)
    resumed = manager.resume("auto")  # after accelerator.prepare
    for step in range(resumed.step + 1 if resumed else 1, num_steps + 1):
        ...
        if step % 100 == 0:
            manager.save(step, state={"rows": rows})
        if manager.should_stop():
            manager.save(step, state={"rows": rows}, final=True)
            manager.finish()
            raise SystemExit(EXIT_STOPPED)
    manager.finish()
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# HTCondor's and others' status for "saved itself, start me again"; 75 is taken by memory running out (clean_stop.py).
EXIT_STOPPED = 85
# sysexits.h's EX_IOERR: the last checkpoint could not be written.
EXIT_NOT_SAVED = 74


class Stateful(Protocol):
    """Anything whose state fits into JSON."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take the state up again."""


@dataclass(frozen=True)
class ResumedState:
    """Where a run goes on.

    Attributes:
        step: Optimizer steps that are done.
        state: What was given to `CheckpointManager.save`.
        folder: The checkpoint that was loaded.
    """

    step: int
    state: dict[str, Any]
    folder: Path


class CheckpointNotSaved(RuntimeError):
    """The last checkpoint of a run could not be written; end with `EXIT_NOT_SAVED`."""


class CheckpointManager:
    """Writes, keeps, checks and loads the checkpoints of one run.

    Args:
        accelerator: The one that prepared (or will prepare) model, optimizer and schedule.
        output_dir: Checkpoints are ``<output_dir>/checkpoint_<step>``; all nodes must share it.
        keep_last: How many good checkpoints to keep besides milestones; None keeps all.
        keep_every: Checkpoints at multiples of this many steps are never deleted.
        asynchronous: Copy to host memory, then write while training goes on.

    Raises:
        ConfigError: for counts below one, or if this strategy cannot write asynchronously.
    """

    def __init__(
        self,
        accelerator: Any,
        output_dir: str | Path,
        *,
        keep_last: int | None = 2,
        keep_every: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        raise NotImplementedError("in work")

    def register(self, name: str, obj: Stateful) -> None:
        """Save and load `obj` with every checkpoint; call before `resume`.

        Raises:
            ConfigError: if the name is taken or `obj` has no state.
        """

    def resume(self, how: str | Path = "auto") -> ResumedState | None:
        """Load a checkpoint into everything that was prepared and registered; collective.

        Call it after ``accelerator.prepare(model, optimizer, scheduler)``.

        Args:
            how: ``"auto"`` takes the newest good checkpoint of `output_dir` and returns None if there is none;
                ``"no"`` returns None; anything else is the path of a checkpoint.

        Raises:
            ConfigError: if the named checkpoint is not good, or was written by something that cannot be loaded here.
        """

    def save(self, step: int, state: dict[str, Any] | None = None, *, final: bool = False) -> Path | None:
        """Write ``checkpoint_<step>``; collective.

        Args:
            step: Optimizer steps that are done.
            state: JSON-able, e.g. the position in the data; the same on every rank (rank 0's is written).
            final: Nothing comes after it: wait for it, and raise if it cannot be written.

        Returns:
            Its folder (asynchronous: the folder it will have), or None if it could not be written: the reason was
            printed, older checkpoints are untouched, the run can go on.

        Raises:
            CheckpointNotSaved: if `final` and it could not be written.
            ConfigError: if a state is not JSON-able.
        """

    def should_stop(self) -> bool:
        """Whether SIGTERM or SIGUSR1 has reached any rank; collective, a few bytes over the hosts."""
        return False

    def finish(self) -> None:
        """Wait for what is being written; collective.

        Raises:
            CheckpointNotSaved: if the newest checkpoint could not be written.
        """

    def close(self) -> None:
        """`finish`, then give the signals back; for programs that go on to other things."""
