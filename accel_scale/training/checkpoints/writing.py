"""Write one checkpoint: staged on every rank, hashed, synced, listed and renamed; or removed again."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.training.checkpoints.atomic import publish, staging_root
from accel_scale.training.checkpoints.contents import Write
from accel_scale.training.checkpoints.folders import checkpoint_folder, delete_old, files_of_rank, list_checkpoints
from accel_scale.training.checkpoints.manifest import Manifest, describe_files, write_manifest
from accel_scale.training.checkpoints.ranks import FailedSomewhere, Meeting

# Writers report a full disk in different ways; with less than this left, the disk is considered full.
_FULL_BYTES = 2**20


@dataclass(frozen=True)
class Job:
    """One checkpoint to write.

    Attributes:
        output_dir: Folder of the run.
        manifest: Complete except for its files and its sequence number.
        writes: Write this rank's files; collective if the format is.
        meeting: The `Meeting` of the thread that runs the job.
        clean_up: Called on rank 0 after publishing.
        check: Called on every rank with the written folder before it is published; collective, an error is raised on
            all ranks.
    """

    output_dir: Path
    manifest: Manifest
    writes: tuple[Write, ...]
    meeting: Meeting
    clean_up: Callable[[], None]
    check: Write | None = None

    @property
    def folder(self) -> Path:
        """The folder in which it will appear."""
        return checkpoint_folder(self.output_dir, self.manifest.step)

    def run(self) -> str | None:
        """Write and publish the checkpoint; collective.

        Returns:
            The reason why it could not be written, on every rank, with everything removed. None after success.

        Raises:
            ConfigError: if it holds data that cannot be read back safely; on every rank, with everything removed.
        """
        staged, meeting = staging_root(self.output_dir) / self.folder.name, self.meeting
        try:
            meeting.on_main(lambda: _make_empty(staged))
            meeting.together(lambda: _require_shared(staged, self.output_dir))
            meeting.together(lambda: self._write(staged))
            if self.check is not None:
                self.check(staged)
            described = meeting.together(lambda: self._describe(staged))
            meeting.on_main(lambda: self._publish(staged, {k: v for files in described for k, v in files.items()}))
        except (FailedSomewhere, ConfigError) as error:
            free = meeting.from_main(_free_bytes(self.output_dir))  # nobody is writing any more
            if meeting.rank == 0:
                _remove(staged)
            meeting.gather(None)
            if isinstance(error, ConfigError):
                raise
            return f"the disk is full ({error})" if free < _FULL_BYTES else str(error)
        # Old checkpoints that cannot be removed now can wait for the next time.
        with contextlib.suppress(FailedSomewhere):
            meeting.on_main(self.clean_up)
        return None

    def _write(self, staged: Path) -> None:
        for write in self.writes:
            write(staged)

    def _describe(self, staged: Path) -> dict[str, tuple[int, str]]:
        names = files_of_rank(staged, self.meeting.rank)
        return describe_files(staged, names, self.manifest.algorithm, sync=True)

    def _publish(self, staged: Path, files: dict[str, tuple[int, str]]) -> None:
        good, _ = list_checkpoints(self.output_dir)
        sequence = 1 + max((found.manifest.sequence for found in good), default=0)
        write_manifest(staged, replace(self.manifest, sequence=sequence, files=dict(sorted(files.items()))))
        publish(staged, self.folder)


class Writer:
    """Writes one job at a time in a thread while training continues."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.job: Job | None = None
        self._thread: threading.Thread | None = None
        self._outcome: str | None = None
        self._error: BaseException | None = None

    def start(self, job: Job) -> None:
        """Start the thread; the previous job must have been waited for."""
        self.job, self._outcome, self._error = job, None, None
        # Not a daemon: a program that ends without `finish` still completes its last checkpoint.
        self._thread = threading.Thread(target=self._run, args=(job,), name="accel-scale-checkpoint")
        self._thread.start()

    def _run(self, job: Job) -> None:
        try:
            self._outcome = job.run()
        except BaseException as error:
            self._error = error

    def wait(self) -> str | None:
        """Wait for the job; returns or raises what `Job.run` did."""
        assert self._thread is not None
        self._thread.join()
        self.job = None
        if self._error is not None:
            raise self._error
        return self._outcome


def clean_up_after(output_dir: Path, *, keep_last: int | None, keep_every: int | None) -> Callable[[], None]:
    """Return a function that removes the checkpoints that the rules do not keep."""
    return lambda: delete_old(output_dir, keep_last=keep_last, keep_every=keep_every)


def _make_empty(staged: Path) -> None:
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir(parents=True)


def _require_shared(staged: Path, output_dir: Path) -> None:
    if not staged.is_dir():
        raise ConfigError(
            f"{output_dir} is not one folder for all nodes.",
            place="CheckpointManager(output_dir=)",
            fix="put it on a filesystem that all nodes share.",
        )


def _remove(staged: Path) -> None:
    shutil.rmtree(staged, ignore_errors=True)
    with contextlib.suppress(OSError):  # there may be another one beside it
        staged.parent.rmdir()


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
