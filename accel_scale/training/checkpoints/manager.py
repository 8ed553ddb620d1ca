"""Checkpoints of a plain Accelerate loop: published complete or not at all, verified before use.

manager = CheckpointManager(accelerator, "runs/a", keep_last=2)
manager.register("guard", guard)
resumed = manager.resume("auto")  # after accelerator.prepare
for step in range(resumed.step + 1 if resumed else 1, num_steps + 1):
    ...
    stopping = manager.should_stop()
    if stopping or step % 100 == 0 or step == num_steps:
        manager.save(step, state={"rows": rows}, final=stopping or step == num_steps)
    if stopping:
        manager.finish()
        raise SystemExit(EXIT_STOPPED)
manager.finish()
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accel_scale.ending.user_errors import CheckpointNotSaved
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import EXIT_STOPPED
from accel_scale.parallel.engine import strategy_of
from accel_scale.training.checkpoints.atomic import staging_root
from accel_scale.training.checkpoints.contents import (
    Write,
    capture_common,
    load_common,
    load_random_states,
    load_scaler,
    read_state,
)
from accel_scale.training.checkpoints.folders import choose, open_checkpoint, resumed_line
from accel_scale.training.checkpoints.hook_states import capture_hook_states, load_hook_states
from accel_scale.training.checkpoints.manifest import TRAINER_LAYOUT, Manifest
from accel_scale.training.checkpoints.ranks import Meeting
from accel_scale.training.checkpoints.settings import refuse_changes
from accel_scale.training.checkpoints.signals import StopSignals
from accel_scale.training.checkpoints.staging import prepare_output_dir
from accel_scale.training.checkpoints.strategies import (
    check_fit,
    check_schedules,
    contents_of,
    contents_written_by,
    refuse_other_savers,
)
from accel_scale.training.checkpoints.writing import Job, Writer, clean_up_after


class Stateful(Protocol):
    """Any object whose state fits into JSON."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which can be stored as JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore the state."""


@dataclass(frozen=True)
class ResumedState:
    """The point from which a run continues.

    Attributes:
        step: Optimizer steps already taken.
        state: The `state` that was passed to `CheckpointManager.save`.
        folder: The checkpoint that was loaded.
    """

    step: int
    state: dict[str, Any]
    folder: Path


class CheckpointManager:
    """Writes, keeps, checks and loads the checkpoints of one run.

    Args:
        accelerator: The `Accelerator` that prepared (or will prepare) model, optimizer and schedule.
        output_dir: Checkpoints are ``<output_dir>/checkpoint-<step>``; all nodes must share it.
        keep_last: How many good checkpoints to keep besides milestones; None keeps all.
        keep_every: Checkpoints at multiples of this many steps are never deleted.
        asynchronous: Copy to host memory, then write while training continues.
        settings: The settings that define the run, as JSON: stored in every checkpoint, and compared in `resume`.
        allow_changed_settings: Resume even if they differ.

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
        settings: dict[str, Any] | None = None,
        allow_changed_settings: bool = False,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}.", place=f"CheckpointManager({name}=)", fix="keep 1 or more.")
        self._accelerator = accelerator
        self._output_dir = Path(output_dir).absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._settings, self._allow_changed_settings = settings or {}, allow_changed_settings
        self._registered: dict[str, Stateful] = {}
        self._strategy = strategy_of(accelerator)
        self._contents = contents_of(accelerator, self._strategy)
        reason = self._contents.refuse_asynchronous() if asynchronous else None
        if reason:
            raise ConfigError(
                f"{self._strategy.name} cannot write checkpoints while training continues: {reason}.",
                place="CheckpointManager(asynchronous=)",
                fix="leave it out.",
            )
        self._meeting = Meeting()
        self._writer = Writer(Meeting(separate=True)) if asynchronous else None
        self._signals = StopSignals()
        self._signals.install()
        self._stopped_by = 0  # the signal's number, the same on every rank
        self._last_failure: str | None = None
        self._has_recovered = False

    def register(self, name: str, obj: Stateful) -> None:
        """Save and load `obj` with every checkpoint; call before `resume`. Rank 0's state is kept.

        Raises:
            ConfigError: if the name is taken or `obj` has no state.
        """
        if name in self._registered:
            raise ConfigError(f"{name!r} is registered already.", place="register", fix="choose another name.")
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise ConfigError(
                f"{type(obj).__name__} has no state_dict and load_state_dict.", place="register", fix="add both."
            )
        self._registered[name] = obj

    def resume(self, how: str | Path = "auto", *, compare: bool = True) -> ResumedState | None:
        """Load a checkpoint into all prepared and registered objects; collective.

        Call it after ``accelerator.prepare(model, optimizer, scheduler)``.

        Args:
            how: ``"auto"`` takes the newest good checkpoint of `output_dir` and returns None if there is none;
                ``"no"`` returns None; anything else is the path of a checkpoint.
            compare: Refuse a checkpoint saved with other settings, unless changed settings are allowed.

        Raises:
            ConfigError: if the named checkpoint is not good, or was written in a form that cannot be loaded here.
        """
        self._recover()
        self._wait()  # a run that rolls back may still be writing
        if how == "no":
            return None
        if how == "auto":
            found = choose(self._output_dir, self._meeting, self._say)
        else:
            found = open_checkpoint(Path(how).absolute(), self._meeting)
        if found is None:
            return None
        if compare and not self._allow_changed_settings:
            refuse_changes(found.folder, found.manifest.settings, self._settings, place="resume")
        if found.manifest.layout.startswith(TRAINER_LAYOUT):
            raise ConfigError(
                f"{found.folder} was written by a Trainer.", place="resume", fix="start from its weights instead."
            )
        content = read_state(found.folder)
        check_fit(found, self._strategy, set(content["registered"]), set(self._registered))
        check_schedules(self._accelerator, found)
        refuse_other_savers(self._accelerator)
        accelerator, scratch = self._accelerator, staging_root(self._output_dir) / "converted"
        load_scaler(accelerator, content)
        contents = contents_written_by(found, accelerator, self._contents)
        contents.load(found.folder, found.manifest, scratch)
        load_hook_states(accelerator, found.folder)
        load_common(accelerator, found.folder, content, self._registered)
        self._meeting.gather(None)  # all ranks have read it
        self._recover(again=True)  # the scratch folder
        load_random_states(accelerator, found.folder, found.manifest)
        self._say(resumed_line(found, self._meeting.world_size))
        return ResumedState(found.manifest.step, content["state"], found.folder)

    def save(self, step: int, state: dict[str, Any] | None = None, *, final: bool = False) -> Path | None:
        """Write ``checkpoint-<step>``; collective.

        Args:
            step: Optimizer steps already taken.
            state: As JSON, e.g. the position in the data; the same on every rank (rank 0's is written).
            final: Nothing follows: wait for the write, and raise if it fails.

        Returns:
            Its folder (the future one if asynchronous), or None if it could not be written: the reason was printed,
                older checkpoints are untouched, and the run can continue.

        Raises:
            CheckpointNotSaved: if `final` and it could not be written.
            ConfigError: if a state cannot be stored as JSON.
        """
        self._recover()
        self._wait()
        refuse_other_savers(self._accelerator)
        is_asynchronous = self._writer is not None and not final
        meeting = self._writer.meeting if self._writer is not None and is_asynchronous else self._meeting
        writes: list[Write] = []

        def capture() -> None:
            writes.append(capture_common(self._accelerator, state or {}, self._registered))
            writes.append(self._contents.capture(copy=is_asynchronous, group=meeting.group))
            writes.append(capture_hook_states(self._accelerator, copy=is_asynchronous))

        self._meeting.together(capture)
        job = Job(
            output_dir=self._output_dir,
            manifest=self._manifest(step),
            writes=tuple(writes),
            meeting=meeting,
            clean_up=clean_up_after(self._output_dir, keep_last=self._keep_last, keep_every=self._keep_every),
        )
        if is_asynchronous:
            assert self._writer is not None
            self._writer.start(job)
            return job.folder
        self._note(job, job.run())
        if self._last_failure and final:
            raise CheckpointNotSaved(self._last_failure)
        return None if self._last_failure else job.folder

    def should_stop(self) -> bool:
        """True once SIGTERM, SIGUSR1 or Ctrl-C has reached any rank; collective, a few bytes over the hosts."""
        if not self._stopped_by:
            self._stopped_by = self._meeting.largest(self._signals.received)
        return self._stopped_by != 0

    @property
    def stopped_by(self) -> str | None:
        """Name of the signal that made `should_stop` return True."""
        return signal.Signals(self._stopped_by).name if self._stopped_by else None

    @property
    def exit_status(self) -> int:
        """Exit status for a program ended by `should_stop`: it has saved, and the same command continues."""
        return EXIT_STOPPED

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; collective.

        Raises:
            CheckpointNotSaved: if the newest checkpoint could not be written.
        """
        self._wait()
        if self._meeting.is_distributed:
            # gloo's thread needs the interpreter to return the last `should_stop`'s tensor; a program that frees its
            # process group before that waits forever (torch 2.13).
            time.sleep(0.02)
        if self._last_failure:
            raise CheckpointNotSaved(self._last_failure)

    def close(self) -> None:
        """Call `finish`, then restore the signal handlers; for programs that continue with other work."""
        try:
            self.finish()
        finally:
            self._signals.restore()

    def _wait(self) -> None:
        if self._writer is not None and self._writer.job is not None:
            job = self._writer.job
            self._note(job, self._writer.wait())

    def _note(self, job: Job, failure: str | None) -> None:
        self._last_failure = failure and f"{job.folder.name} was not saved: {failure}"
        if failure:
            self._say(f"warning: {self._last_failure}. Older checkpoints are untouched.")

    def _recover(self, *, again: bool = False) -> None:
        """Remove the unfinished writes of a killed run, before anything else is written."""
        if self._has_recovered and not again:
            return
        self._has_recovered = True
        lines = prepare_output_dir(self._output_dir, self._meeting)
        for line in lines if not again else []:
            self._say(f"{self._output_dir.name}: {line}")

    def _manifest(self, step: int) -> Manifest:
        return Manifest.of_run(
            step,
            world_size=self._meeting.world_size,
            strategy=self._strategy.name,
            layout=self._contents.layout,
            stopped_by=self.stopped_by,
            settings=self._settings,
        )

    def _say(self, line: str) -> None:
        if self._meeting.rank == 0:
            print(line, flush=True)
