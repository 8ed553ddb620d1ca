"""The checkpoints of an output folder: which are good, which may be deleted, and which one a run continues from."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.training.checkpoints.atomic import checkpoint_problems, staging_root
from accel_scale.training.checkpoints.manifest import MANIFEST, Damaged, Manifest, changed_files, read_manifest
from accel_scale.training.checkpoints.ranks import Meeting

# Earlier versions wrote an underscore.
_NAME = re.compile(r"checkpoint[-_](\d+)")
# Also matches the folders that Accelerate's examples save.
_ANY_NAME = re.compile(r"(checkpoint[-_]|step_|epoch_)(\d+)")
TRAINER_STATE = "trainer_state.json"
# Files written by a rank other than the first have its number in their name.
_RANK_IN_NAME = re.compile(r"(?:__|pp_rank_|random_states_|rng_state_|ddp_hook_|tensors/rank)0*(\d+)")


@dataclass(frozen=True)
class Found:
    """A good checkpoint, judged by names, sizes and the manifest."""

    folder: Path
    manifest: Manifest


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of `step`, named as by the Trainer, which `from_pretrained` and the hub recognise."""
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> tuple[list[Found], dict[Path, str]]:
    """Good checkpoints, last saved first, and the problem of each damaged one; `list_foreign`'s are in neither."""
    good: list[Found] = []
    damaged: dict[Path, str] = {}
    for folder in _named_folders(output_dir, _NAME):
        if is_foreign(folder):
            continue
        try:
            good.append(Found(folder, read_manifest(folder)))
        except Damaged as problem:
            damaged[folder] = str(problem)
    return sorted(good, key=lambda found: found.manifest.sequence, reverse=True), damaged


def is_foreign(folder: Path) -> bool:
    """True if another program's Trainer or an earlier version wrote `folder`: there is no manifest."""
    return (folder / TRAINER_STATE).is_file() and not (folder / MANIFEST).exists()


def list_foreign(output_dir: Path) -> list[Path]:
    """Checkpoints without a manifest, in ascending order of steps."""
    found = [folder for folder in _named_folders(output_dir, _NAME) if is_foreign(folder)]
    return sorted(found, key=_number)


def latest_complete_checkpoint(output_dir: str | Path) -> str | None:
    """Path of the last saved complete checkpoint under `output_dir`, or None.

    Recognises ``checkpoint-<n>``, ``checkpoint_<n>``, and the ``step_<n>`` and ``epoch_<n>`` of Accelerate's examples.
    Compares file sizes with the manifest, or reads headers if there is none; loading compares checksums.
    """
    output_dir = Path(output_dir)
    good, _ = list_checkpoints(output_dir)
    if good:
        return str(good[0].folder)
    newest: dict[str, Path] = {}  # the highest number for each kind of name
    for folder in sorted(_named_folders(output_dir, _ANY_NAME), key=_number):
        if any(folder.iterdir()) and not checkpoint_problems(folder):
            newest[folder.name.rstrip("0123456789")] = folder
    return str(max(newest.values(), key=lambda folder: folder.stat().st_mtime_ns)) if newest else None


def run_of(folder: Path) -> Path:
    """The run folder that the checkpoint `folder` belongs to; `folder` itself if its name is not a checkpoint's."""
    return folder.parent if _ANY_NAME.fullmatch(folder.name) else folder


def _named_folders(output_dir: Path, name: re.Pattern[str]) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return sorted(path for path in output_dir.iterdir() if name.fullmatch(path.name) and path.is_dir())


def _number(folder: Path) -> int:
    return int(re.split(r"[-_]", folder.name)[-1])


def delete_old(
    output_dir: Path, *, keep_last: int | None, keep_every: int | None = None, best: Path | None = None
) -> None:
    """Remove good checkpoints beyond the newest `keep_last`, except milestones; damaged ones do not count.

    `best` counts as the second newest and is always kept.
    """
    if keep_last is None:
        return
    good, _ = list_checkpoints(output_dir)
    others = [found for found in good[1:] if found.folder == best]
    good = [*good[:1], *others, *(found for found in good[1:] if found.folder != best)]
    for found in good[keep_last:]:
        if found.folder != best and (keep_every is None or found.manifest.step % keep_every):
            # In one rename: a kill during the deletion then leaves an unfinished folder, not a damaged one.
            leaving = staging_root(output_dir) / f"deleted-{found.folder.name}"
            with contextlib.suppress(OSError):
                leaving.parent.mkdir(exist_ok=True)
                os.rename(found.folder, leaving)
                shutil.rmtree(leaving)
                leaving.parent.rmdir()


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Files below `folder` that `rank` wrote, judged by their names; files without a rank belong to the first."""
    names = []
    for directory, _, files in os.walk(folder):
        for file in files:
            name = str(Path(directory, file).relative_to(folder))
            match = _RANK_IN_NAME.search(name)
            if (int(match.group(1)) if match else 0) == rank:
                names.append(name)
    return sorted(names)


def choose(output_dir: Path, meeting: Meeting, say: Callable[[str], None], *, place: str = "resume") -> Found | None:
    """The newest checkpoint whose bytes all match its manifest; collective, with the same result on all ranks.

    Damaged ones are renamed to ``checkpoint-<step>.damaged``, with a line that states the problem.

    Raises:
        ConfigError: if all checkpoints lack a manifest; a new run would overwrite them.
    """
    good, damaged = meeting.on_main(lambda: list_checkpoints(output_dir))
    for folder, problem in damaged.items():
        say(_set_aside(folder, problem, meeting))
    for found in good:
        problems = changed_anywhere(found, meeting)
        if not problems:
            return found
        say(_set_aside(found.folder, problems[0], meeting))
    meeting.on_main(lambda: refuse_foreign(output_dir, place=place))
    if good or damaged:
        say(f"warning: no good checkpoint is left in {output_dir}: training starts from the beginning.")
    return None


def refuse_foreign(output_dir: Path, *, place: str) -> None:
    """Refuse checkpoints without a manifest, which are resumed only if the user names one.

    Raises:
        ConfigError: if there are any.
    """
    foreign = list_foreign(output_dir)
    if foreign:
        raise ConfigError(
            f"{foreign[-1]} has no {MANIFEST}: another program or an earlier version wrote it.",
            place=place,
            fix="name it here to continue from it, or choose another output folder.",
        )


def changed_anywhere(found: Found, meeting: Meeting) -> list[str]:
    """One line per file that differs from what was written; the ranks share the reading."""
    names = sorted(found.manifest.files)[meeting.rank :: meeting.world_size]
    problems = meeting.together(lambda: changed_files(found.folder, found.manifest, names))
    return [line for lines in problems for line in lines]


def read_checkpoint(folder: Path, *, place: str) -> Found:
    """The checkpoint named by the user, checked by names and sizes.

    Raises:
        ConfigError: if it does not exist or is not good.
    """
    inside = [path.name for path in sorted(_named_folders(folder, _NAME), key=_number)]
    if inside and not (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{folder} holds checkpoints and is none.",
            place=place,
            fix=f"name one, e.g. {folder / inside[-1]}.",
        )
    try:
        return Found(folder, read_manifest(folder))
    except Damaged as problem:
        raise ConfigError(f"{folder} is not a good checkpoint: {problem}.", place=place, fix=_FIX) from problem


def open_checkpoint(folder: Path, meeting: Meeting, *, place: str = "resume") -> Found:
    """Open the checkpoint named by the user, with checksums compared; collective.

    Raises:
        ConfigError: if it does not exist or is not good.
    """

    found = meeting.on_main(lambda: read_checkpoint(folder, place=place))
    problems = changed_anywhere(found, meeting)
    if problems:
        raise ConfigError(f"{folder} is damaged: {problems[0]}.", place=place, fix=_FIX)
    return found


def resumed_line(found: Found, world_size: int) -> str:
    """The line that a resumed run prints."""
    before = found.manifest.world_size
    change = "" if before == world_size else f", written by {before} ranks and now on {world_size}"
    return f"resumed from {found.folder} (step {found.manifest.step}{change})"


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
