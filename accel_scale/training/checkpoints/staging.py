"""Atomic folders across processes: all write into one staging folder, and one process publishes it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.launching.run_folder import record_published, refuse_foreign_model
from accel_scale.modeling.gathering import broadcast_from_main, process_index, wait_for_everyone
from accel_scale.training.checkpoints.atomic import publish, publish_into, recover, staging_root
from accel_scale.training.checkpoints.ranks import FailedSomewhere, Meeting


@contextlib.contextmanager
def save_atomically(folder: str | Path) -> Iterator[Path]:
    """Yield a staging folder to write into, on every process; it becomes `folder` when all processes have finished.

    After a kill or an error `folder` is absent or unchanged. Works around `accelerator.save_state`, `save_pretrained`
    or any other code that writes files:

        with save_atomically("runs/a/checkpoint-100") as staging:
            accelerator.save_state(staging)

    If `folder` exists and holds more than its model (checkpoints, logs), the new files are moved into it, and the
    configuration that makes it loadable last. A README.md that was not written in this way is kept.

    Raises:
        ConfigError: if `folder` holds a model that was not written in this way and would be replaced.
    """
    folder = Path(folder).absolute()
    inside = broadcast_from_main(_holds_a_run(folder))
    if inside:
        refuse_foreign_model(folder)
    staged = staging_root(folder if inside else folder.parent) / folder.name
    if process_index() == 0:
        shutil.rmtree(staged, ignore_errors=True)
    wait_for_everyone()
    staged.mkdir(parents=True, exist_ok=True)  # on every process: nodes may not share a filesystem
    try:
        yield staged
    except BaseException:
        if process_index() == 0:  # on a full disk the space is needed at once
            shutil.rmtree(staged, ignore_errors=True)
            with contextlib.suppress(OSError):
                staged.parent.rmdir()
        raise
    publish_everywhere(staged, folder, inside=inside)


def _holds_a_run(folder: Path) -> bool:
    """True if `folder` is a run's folder rather than one checkpoint, and must therefore stay in place."""
    return folder.is_dir() and not folder.name.startswith("checkpoint") and any(folder.iterdir())


def publish_everywhere(staged: Path, folder: Path, *, inside: bool) -> None:
    """Rank 0 publishes for all nodes on its filesystem; the first process of any other node publishes for its own."""

    def move() -> None:
        if inside or not folder.name.startswith("checkpoint"):
            record_published(staged, folder)
        (publish_into if inside else publish)(staged, folder)

    wait_for_everyone()
    if process_index() == 0:
        move()
    wait_for_everyone()
    if process_index() != 0 and os.environ.get("LOCAL_RANK", "0") == "0" and staged.is_dir():
        move()
    wait_for_everyone()


def prepare_output_dir(output_dir: str | Path, meeting: Meeting | None = None) -> list[str]:
    """Remove the unfinished files of a killed run in `output_dir`; call it on every process before training.

    Returns:
        One line per leftover.

    Raises:
        ConfigError: on every process, if the folder cannot be used.
    """
    try:
        return (meeting or Meeting()).on_main(lambda: recover(output_dir))
    except FailedSomewhere as error:
        raise ConfigError(
            f"{output_dir} cannot be used ({error}).", place="output_dir", fix="choose another one."
        ) from error
