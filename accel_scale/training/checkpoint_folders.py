"""The checkpoints of an output folder: which are good, which may go, which one a run goes on from."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.training.atomic import staging_root
from accel_scale.training.checkpoint_manifest import MANIFEST, Damaged, Manifest, changed_files, read_manifest
from accel_scale.training.checkpoint_ranks import Meeting

_NAME = re.compile(r"checkpoint_(\d+)")
# Files that a rank other than the first writes carry its number.
_RANK_IN_NAME = re.compile(r"(?:__|pp_rank_|random_states_|ddp_hook_|tensors/rank)0*(\d+)")


@dataclass(frozen=True)
class Found:
    """A good checkpoint, as far as names, sizes and the manifest tell."""

    folder: Path
    manifest: Manifest


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` goes; Accelerate's naming."""
    return output_dir / f"checkpoint_{step}"


def list_checkpoints(output_dir: Path) -> tuple[list[Found], dict[Path, str]]:
    """Good checkpoints, the one saved last first, and what is wrong with the others."""
    good: list[Found] = []
    damaged: dict[Path, str] = {}
    for folder in sorted(output_dir.iterdir()) if output_dir.is_dir() else []:
        if not _NAME.fullmatch(folder.name) or not folder.is_dir():
            continue
        try:
            good.append(Found(folder, read_manifest(folder)))
        except Damaged as problem:
            damaged[folder] = str(problem)
    return sorted(good, key=lambda found: found.manifest.sequence, reverse=True), damaged


def delete_old(output_dir: Path, *, keep_last: int | None, keep_every: int | None) -> None:
    """Remove good checkpoints beyond the newest `keep_last`, except milestones; damaged ones are not counted."""
    if keep_last is None:
        return
    good, _ = list_checkpoints(output_dir)
    for found in good[keep_last:]:
        if keep_every is None or found.manifest.step % keep_every:
            # By one rename: a kill while it is being deleted leaves something unfinished, not something damaged.
            leaving = staging_root(output_dir) / f"deleted-{found.folder.name}"
            with contextlib.suppress(OSError):
                leaving.parent.mkdir(exist_ok=True)
                os.rename(found.folder, leaving)
                shutil.rmtree(leaving)
                leaving.parent.rmdir()


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Files below `folder` that `rank` wrote, by their names; those without a rank are the first one's."""
    names = []
    for directory, _, files in os.walk(folder):
        for file in files:
            name = str(Path(directory, file).relative_to(folder))
            match = _RANK_IN_NAME.search(name)
            if (int(match.group(1)) if match else 0) == rank:
                names.append(name)
    return sorted(names)


def choose(output_dir: Path, meeting: Meeting, say: Callable[[str], None]) -> Found | None:
    """The newest checkpoint whose every byte is what was written; collective, all ranks get the same.

    Damaged ones are set aside as ``checkpoint_<step>.damaged`` with a line that says what is wrong.
    """
    good, damaged = meeting.on_main(lambda: list_checkpoints(output_dir))
    for folder, problem in damaged.items():
        say(_set_aside(folder, problem, meeting))
    for found in good:
        problems = changed_anywhere(found, meeting)
        if not problems:
            return found
        say(_set_aside(found.folder, problems[0], meeting))
    if good or damaged:
        say(f"warning: no good checkpoint is left in {output_dir}: training starts from the beginning.")
    return None


def changed_anywhere(found: Found, meeting: Meeting) -> list[str]:
    """One line per file that is not what was written; the ranks share the reading."""
    names = sorted(found.manifest.files)[meeting.rank :: meeting.world_size]
    problems = meeting.together(lambda: changed_files(found.folder, found.manifest, names))
    return [line for lines in problems for line in lines]


def open_checkpoint(folder: Path, meeting: Meeting) -> Found:
    """The checkpoint that the user named; collective.

    Raises:
        ConfigError: if it is not there or not good.
    """

    def read() -> Found:
        inside = sorted(path.name for path in folder.glob("checkpoint_*")) if folder.is_dir() else []
        if inside and not (folder / MANIFEST).is_file():
            raise ConfigError(
                f"{folder} holds checkpoints and is none.",
                place="resume",
                fix=f"name one, e.g. {folder / inside[-1]}.",
            )
        try:
            return Found(folder, read_manifest(folder))
        except Damaged as problem:
            raise ConfigError(f"{folder} is no good checkpoint: {problem}.", place="resume", fix=_FIX) from problem

    found = meeting.on_main(read)
    problems = changed_anywhere(found, meeting)
    if problems:
        raise ConfigError(f"{folder} is damaged: {problems[0]}.", place="resume", fix=_FIX)
    return found


_FIX = "name another one, or resume 'auto' to take the newest good one."


def _set_aside(folder: Path, problem: str, meeting: Meeting) -> str:
    def move() -> str:
        for number in range(1000):
            aside = folder.with_name(f"{folder.name}.damaged" + (f"-{number}" if number else ""))
            if not aside.exists():
                with contextlib.suppress(OSError):  # no permission: it stays, and is recognised the next time
                    os.rename(folder, aside)
                    return aside.name
                break
        return folder.name

    return f"warning: {folder.name} is damaged ({problem}): left as {meeting.on_main(move)}, not used."
