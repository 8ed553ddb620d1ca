"""Where a recipe's run starts: from a checkpoint, from the beginning, or not at all because it is finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.flags.paths import resume_choice
from accel_scale.reporting.summary import SUMMARY_NAME
from accel_scale.training.checkpoints.folders import (
    is_foreign,
    list_checkpoints,
    list_foreign,
    read_checkpoint,
    refuse_foreign,
)
from accel_scale.training.checkpoints.manifest import Damaged, read_manifest
from accel_scale.training.checkpoints.settings import (
    ALLOW_FLAG,
    differences,
    files_fingerprint,
    meaning_of,
    model_record,
    refuse_changes,
    rows_fingerprint,
    schedule_length,
    with_defaults,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedConfig

    from accel_scale.flags.pretraining import PretrainArguments


@dataclass(frozen=True)
class Course:
    """The settings of a recipe's run, and where it starts from.

    Attributes:
        output_dir: Folder of the run.
        how: The result of `resume_choice`.
        settings: The settings that define the run.
        goal: When the run is finished, e.g. ``200 steps``.
        allow_changed_settings: Continue even if settings differ.
        place: Where the user set `how`.
    """

    output_dir: Path
    how: str
    settings: dict[str, Any] = field(repr=False)
    goal: str
    allow_changed_settings: bool
    place: str

    @property
    def choice(self) -> str | None:
        """The argument for a trainer's `train`."""
        return None if self.how == "no" else self.how

    def follow(self, trainer: Any, started: float) -> None:
        """Let `trainer` record and compare the settings of this run; `started` is a `time.perf_counter` value."""
        trainer.run_settings, trainer.allow_changed_settings = self.settings, self.allow_changed_settings
        trainer.resume_words = (self.place, ALLOW_FLAG, "the same command continues from there")
        trainer.started = started

    def keep(self, values: Mapping[str, object], *names: str) -> None:
        """Record the run's own choices for `names`, for `chosen_before`."""
        self.settings.update({name: values[name] for name in names})

    def record(self) -> dict[str, Any]:
        """The record for the summary of a finished run."""
        return {"settings": self.settings, "goal": self.goal}

    def look_ahead(self) -> dict[str, Any] | None:
        """Refuse a run that could not continue, before anything large is loaded; reads a few small files.

        Returns:
            The summary of the run if it is finished.

        Raises:
            ConfigError: if a checkpoint is missing, not good or of another run, or if an earlier run left checkpoints.
        """
        if self.how == "no":
            refuse_leftovers(self.output_dir, place=self.place)
            return None
        if self.how != "auto":
            folder = Path(self.how)
            if not is_foreign(folder):
                self._compare(folder, read_checkpoint(folder, place=self.place).manifest.settings)
            return None
        good, damaged = list_checkpoints(self.output_dir)
        summary = _finished(self.output_dir)
        # Checkpoints may be older than the result, after a stop that saves none at the end.
        if summary is not None and not damaged:
            kept = summary["finished"]
            if kept["goal"] == self.goal and not differences(kept["settings"], self.settings):
                return summary
            if not good and not self.allow_changed_settings:
                refuse_changes(
                    self.output_dir,
                    {**kept["settings"], "length": kept["goal"]},
                    {**self.settings, "length": self.goal},
                    place=self.place,
                )
        if good:
            self._compare(good[0].folder, good[0].manifest.settings)
        else:
            refuse_foreign(self.output_dir, place=self.place)
        return None

    def _compare(self, folder: Path, before: Mapping[str, Any]) -> None:
        if not self.allow_changed_settings:
            refuse_changes(folder, before, self.settings, place=self.place)

    def say_finished(self, summary: dict[str, Any], *, is_main: bool) -> dict[str, Any]:
        """Print the result of an earlier, finished run of the same command; nothing is trained or written."""
        from accel_scale.reporting.run_tables import end_rows
        from accel_scale.reporting.tables import print_table

        if is_main:
            print_table("done before", end_rows(summary))
            print(
                f"{self.output_dir} holds this run, finished after {summary['steps']:,} steps: nothing is left to do. "
                "To train again, use another --output_dir.",
                flush=True,
            )
        return summary


def chosen_before(name: str, output_dir: object, resume: object) -> object:
    """The earlier run's choice for one of `KEPT`; None if there is no such run or it recorded none."""
    how = resume_choice("auto" if resume is None else resume)
    if output_dir is None or how == "no":
        return None
    if how == "auto":
        good, _ = list_checkpoints(Path(str(output_dir)))
        return good[0].manifest.settings.get(name) if good else None
    try:
        return read_manifest(Path(how)).settings.get(name)
    except Damaged:
        return None  # refused in `look_ahead`, or written by another program


def course_of_sft(
    given: Mapping[str, Any],
    places: Mapping[str, str],
    outcome: Mapping[str, object],
    flag_classes: Sequence[type],
    *,
    model_config: PreTrainedConfig,
    model_name: str,
    rows: Dataset | IterableDataset,
) -> Course:
    """The course of recipes/sft.py, once flags, model configuration and data are known.

    Args:
        given: Flags by name; flags of `flag_classes` that are missing have their defaults.
        places: Where flags were set.
        outcome: The settings that flags resolve to together: method, precision, global batch.
        rows: The training rows.
    """
    names = ("resume_from_checkpoint", "output_dir", "max_steps", "num_train_epochs")
    values = with_defaults(given, flag_classes)
    how, output_dir, steps, epochs = (values[name] for name in names)
    return Course(
        Path(output_dir),
        resume_choice(how),
        settings=meaning_of(
            values,
            **outcome,
            length=schedule_length(values["lr_scheduler_type"], steps, epochs),
            model=model_record(model_config, model_name),
            data=rows_fingerprint(rows),
        ),
        goal=schedule_length("", steps, epochs) or "",
        allow_changed_settings=values["allow_changed_settings"],
        place=places.get("resume_from_checkpoint", "--resume_from_checkpoint"),
    )


def course_of_pretraining(
    args: PretrainArguments,
    values: Mapping[str, Any],
    places: Mapping[str, str],
    outcome: Mapping[str, object],
    *,
    model_config: PreTrainedConfig,
    files: Sequence[Path],
) -> Course:
    """The course of recipes/pretrain.py, once model configuration and data are known.

    Args:
        values: All flags by name.
        places: Where flags were set.
        outcome: The settings that flags resolve to together: method, precision, global batch.
        files: The files that ``--data`` resolves to.
    """
    goal = f"{args.max_tokens} tokens" if args.max_tokens else f"{args.decay_steps or args.max_steps} steps"
    shares = sorted(str(source).rpartition("=")[2] for source in values["data"] if "=" in str(source))
    depends = schedule_length(args.lr_scheduler_type, 1, 0, limited_by_time=args.max_train_time is not None)
    return Course(
        Path(args.output_dir),
        resume_choice(args.resume),
        settings=meaning_of(
            values,
            **outcome,
            length=goal if depends else None,
            model=model_record(model_config, values["model_name_or_path"]),
            data=f"{len(files)} files {files_fingerprint(files)} {','.join(shares)}".strip(),
        ),
        goal=goal,
        allow_changed_settings=args.allow_changed_settings,
        place=places.get("resume", "--resume"),
    )


def refuse_leftovers(output_dir: str | Path, *, place: str) -> None:
    """Refuse to start in a folder with an earlier run's checkpoints or results, which would mix with the new ones.

    Raises:
        ConfigError: if there are any.
    """
    good, _ = list_checkpoints(Path(output_dir))
    foreign = list_foreign(Path(output_dir))
    if good:
        left = f"checkpoints of an earlier run, the last of step {good[0].manifest.step:,}"
    elif foreign:
        left = f"{foreign[-1].name} of an earlier run"
    elif _finished(Path(output_dir)) is not None:
        left = "the result of an earlier run"
    else:
        return
    raise ConfigError(
        f"{output_dir} holds {left}.", place=place, fix=f"use another --output_dir, or continue with {place} auto."
    )


def _finished(output_dir: Path) -> dict[str, Any] | None:
    """The summary of a run that has finished and whose model exists; None otherwise."""
    try:
        summary = json.loads((output_dir / SUMMARY_NAME).read_text(encoding="utf-8"))
        is_finished = {"settings", "goal"} <= summary["finished"].keys() and isinstance(summary["steps"], int)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    has_model = any((output_dir / name).is_file() for name in ("config.json", "adapter_config.json"))
    return summary if is_finished and has_model else None
