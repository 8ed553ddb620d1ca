"""Resuming a trainer: the checkpoint is chosen, checked and compared, and loaded in full or refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.parallel.engine import strategy_of
from accel_scale.trainers import checkpoint_trainer as trainers
from accel_scale.training.checkpoints.folders import (
    Found,
    choose,
    is_foreign,
    list_checkpoints,
    open_checkpoint,
    resumed_line,
)
from accel_scale.training.checkpoints.pickles import refuse_unsafe_folder
from accel_scale.training.checkpoints.ranks import Meeting
from accel_scale.training.checkpoints.settings import refuse_changes
from accel_scale.training.checkpoints.staging import prepare_output_dir

if TYPE_CHECKING:
    from transformers import Trainer

    _TrainerBase = Trainer
else:
    _TrainerBase = object


class ResumeMixin(_TrainerBase):
    """The resuming part of `AtomicSavingMixin`; the overridden methods were checked on transformers 5.23.

    Attributes:
        run_settings: The settings that define the run, stored in every checkpoint and compared when resuming; None
            derives them from the trainer's arguments, model and rows.
        allow_changed_settings: Resume even if they differ.
        resume_words: Names of the resume option and of the override for changed settings; how a stopped run continues.
        resumed: The checkpoint that `train` resumed from; None before and without one.
    """

    model: Any
    run_settings: dict[str, Any] | None = None
    allow_changed_settings: bool = False
    resume_words: tuple[str, str, str] = (
        "resume_from_checkpoint",
        "trainer.allow_changed_settings = True",
        "train(resume_from_checkpoint=True) continues from there",
    )
    resumed: Found | None = None
    _meeting: Meeting
    _settings: dict[str, Any]

    def _say(self, line: str) -> None:
        if self._meeting.rank == 0:
            print(line, flush=True)

    def _resume_point(self, how: str | bool | None, output_dir: Path) -> str | None:
        """Choose and check the folder from which `train` resumes; collective."""
        place = self.resume_words[0]
        if how is None or how is False:
            good, _ = self._meeting.on_main(lambda: list_checkpoints(output_dir))
            if good:
                self._say(
                    f"warning: {output_dir} holds {good[0].folder.name} of an earlier run; this one starts over."
                )
            return None
        if how is True or how == "auto":
            found = choose(output_dir, self._meeting, self._say, place=place)
            if found is None and how is True:
                raise ConfigError(
                    f"there is no complete checkpoint in {output_dir}.",
                    place=place,
                    fix="leave the flag out to start from the beginning.",
                )
            if found is None:
                return None
        else:
            folder = Path(how).absolute()
            if self._meeting.on_main(lambda: is_foreign(folder)):
                self._meeting.on_main(lambda: trainers.check_foreign(folder, place=place))
                self._meeting.on_main(lambda: refuse_unsafe_folder(folder))
                self._say(f"resuming from {folder}, which has no manifest: its content cannot be verified")
                return str(folder)
            found = open_checkpoint(folder, self._meeting, place=place)
        trainers.check_trainer_fit(found, strategy_of(self.accelerator).name, place=place)
        trainers.refuse_nvme(self, found.folder, place=place)
        if not self.allow_changed_settings:
            refuse_changes(
                found.folder, found.manifest.settings, self._settings, place=place, allow=self.resume_words[1]
            )
        self._meeting.on_main(lambda: refuse_unsafe_folder(found.folder))
        self.take_up_counters(trainers.read_counters(found.folder))
        self.resumed = found
        self._say(resumed_line(found, self._meeting.world_size))
        return str(found.folder)

    def counters(self) -> dict[str, Any]:
        """The run's counts so far, as JSON, stored in every checkpoint; collective."""
        return {}

    def take_up_counters(self, counters: dict[str, Any]) -> None:
        """Continue counting from the result of `counters`."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None
    ) -> Any:
        """Load DeepSpeed's state here instead of in the Trainer, which does not support another number of ranks."""
        if not self.is_deepspeed_enabled or resume_from_checkpoint is None:
            with trainers.fsdp_layout(self, self.resumed.manifest if self.resumed else None):
                return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        folder = Path(resume_from_checkpoint)
        manifest = self.resumed.manifest if self.resumed else None
        trainers.load_zero(self, folder, manifest, place=self.resume_words[0])
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self._load_scaler(resume_from_checkpoint)
        self._meeting.gather(None)  # all ranks have read the converted files
        prepare_output_dir(str(self.args.output_dir), self._meeting)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with trainers.fits(Path(resume_from_checkpoint), place=self.resume_words[0]):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with trainers.fits(Path(checkpoint or ""), place=self.resume_words[0]):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _issue_warnings_after_load(self, load_result: object) -> None:
        trainers.refuse_partial(self.model, load_result, place=self.resume_words[0])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        manifest = self.resumed.manifest if self.resumed else None
        if checkpoint is None or not trainers.load_random_states(Path(checkpoint), manifest, self.accelerator):
            super()._load_rng_state(checkpoint)

    def _run_epoch(self, *args: object, **kwargs: object) -> None:
        """Stop a finished run at once: the Trainer's loop checks for the end only after a step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)
