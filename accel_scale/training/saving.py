"""Saving that can be trusted: atomic checkpoints and final folders, read back and compared the first time."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.launching.last_word import repeat_last
from accel_scale.launching.leaving import let_go_of_collectives
from accel_scale.training import checkpoint_trainer as trainers
from accel_scale.training.atomic import checkpoint_problems
from accel_scale.training.checkpoint_folders import (
    Found,
    choose,
    delete_old,
    is_foreign,
    latest_complete_checkpoint,
    list_checkpoints,
    open_checkpoint,
    resumed_line,
)
from accel_scale.training.checkpoint_manifest import Manifest, fast_algorithm, library_versions
from accel_scale.training.checkpoint_pickles import refuse_unsafe_folder
from accel_scale.training.checkpoint_ranks import Meeting
from accel_scale.training.checkpoint_settings import refuse_changes
from accel_scale.training.checkpoint_signals import StopSignals
from accel_scale.training.checkpoint_writing import Job
from accel_scale.training.checkpoints import EXIT_STOPPED, CheckpointNotSaved
from accel_scale.training.final_model import (
    correct_config,
    make_base_resolvable,
    make_generation_config_savable,
    save_final,
)
from accel_scale.training.preparing import strategy_of
from accel_scale.training.quantization_record import quantization_of, read_quantization, record_quantization
from accel_scale.training.staging import prepare_output_dir, save_atomically
from accel_scale.training.verification import CheckpointMismatch, VerifyResult, verify_checkpoint

if TYPE_CHECKING:
    from transformers import Trainer

    _TrainerBase = Trainer
else:
    _TrainerBase = object

__all__ = [
    "AtomicSavingMixin",
    "CheckpointMismatch",
    "VerifyResult",
    "checkpoint_problems",
    "latest_complete_checkpoint",
    "prepare_output_dir",
    "read_quantization",
    "record_quantization",
    "save_atomically",
    "save_final",
    "verify_checkpoint",
]


class AtomicSavingMixin(_TrainerBase):
    """Put before an HF or TRL trainer class: its checkpoints are kept, checked and resumed as `CheckpointManager`'s.

    `Trainer._save_checkpoint` writes from several ranks into one folder; here that folder is in a staging area until
    all ranks have finished, has checksums of every file in its manifest, and is renamed. A save that fails on any rank
    is one line, and the run goes on; the last one raises `CheckpointNotSaved`. SIGTERM, SIGUSR1 and Ctrl-C let `train`
    save, stop and end the process with `EXIT_STOPPED`. `save_model()` becomes `save_final`. The overridden methods
    were checked on transformers 5.23.

    Attributes:
        verify_first_checkpoint: Read the first thing saved back and compare it with memory.
        first_verification: Outcome of that check, None until then.
        run_settings: What gives the run its meaning, kept with every checkpoint and compared when it goes on; None:
            from the trainer's arguments, model and rows.
        allow_changed_settings: Go on although they differ.
        resume_words: Where the user says what to resume, how to allow changed settings, and how a stopped run goes on.
        resumed: The checkpoint that `train` went on from, None before and without one.
        stopped_by: Name of the signal that stopped it, None before.
    """

    model: Any
    verify_first_checkpoint: bool = True
    first_verification: VerifyResult | None = None
    run_settings: dict[str, Any] | None = None
    allow_changed_settings: bool = False
    resume_words: tuple[str, str, str] = (
        "resume_from_checkpoint",
        "trainer.allow_changed_settings = True",
        "train(resume_from_checkpoint=True) goes on from there",
    )
    resumed: Found | None = None
    _meeting: Meeting
    _stop: trainers.StopCallback | None = None
    _staged_in: Path | None = None
    _kept_errors: list[Exception] | None = None
    _folder_to_push: str | None = None

    @property
    def stopped_by(self) -> str | None:
        number = self._stop.number if self._stop is not None else 0
        return signal.Signals(number).name if number else None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; removes what a killed run left, and saves and stops at a signal.

        True resumes the newest good checkpoint; ``"auto"`` does where there is one, else begins.
        """
        self._meeting, self.resumed = Meeting(), None
        output_dir = Path(str(self.args.output_dir)).absolute()
        for line in prepare_output_dir(output_dir, self._meeting):
            self._say(f"{output_dir}: {line}")
        make_base_resolvable(self.model)
        make_generation_config_savable(self.model)
        if self.run_settings is None:
            self.run_settings = trainers.trainer_settings(self)
        folder = self._resume_point(resume_from_checkpoint, output_dir)
        signals = StopSignals()
        signals.install()
        self._stop = trainers.StopCallback(self._meeting, signals)
        self.add_callback(self._stop)
        try:
            result = super().train(folder, *args, **kwargs)
        finally:
            self.remove_callback(self._stop)
            signals.restore()
        if self.stopped_by:
            self._leave()
        return result

    def _leave(self) -> None:
        """End every process with the status of a run that was stopped and can go on."""
        saved = f"checkpoint-{self.state.global_step}"
        self._say(f"saved {saved} after {self.stopped_by}; {self.resume_words[2]}")
        repeat_last(f"saved {saved} after {self.stopped_by}; {self.resume_words[2]}")
        self._meeting.gather(None)  # the launcher ends the others as soon as one has left
        let_go_of_collectives()
        self.accelerator.end_training()
        raise SystemExit(EXIT_STOPPED)

    def _say(self, line: str) -> None:
        if self._meeting.rank == 0:
            print(line, flush=True)

    # ── Resume ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _resume_point(self, how: str | bool | None, output_dir: Path) -> str | None:
        """The folder that `train` goes on from, after everything about it was checked; collective."""
        place = self.resume_words[0]
        if how is None or how is False:
            good, _ = self._meeting.on_main(lambda: list_checkpoints(output_dir))
            if good:
                self._say(
                    f"warning: {output_dir} holds {good[0].folder.name} of an earlier run; this one begins anew."
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
        trainers.check_trainer_fit(found, strategy_of(self.accelerator), place=place)
        trainers.refuse_nvme(self, found.folder, place=place)
        if not self.allow_changed_settings:
            settings = self.run_settings or {}
            refuse_changes(found.folder, found.manifest.settings, settings, place=place, allow=self.resume_words[1])
        self._meeting.on_main(lambda: refuse_unsafe_folder(found.folder))
        self.take_up_counters(trainers.read_counters(found.folder))
        self.resumed = found
        self._say(resumed_line(found, self._meeting.world_size))
        return str(found.folder)

    def counters(self) -> dict[str, Any]:
        """What the run has counted so far, JSON-able, kept with every checkpoint; collective."""
        return {}

    def take_up_counters(self, counters: dict[str, Any]) -> None:
        """Go on counting from what `counters` returned."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """DeepSpeed's state is loaded here rather than by the Trainer, which knows no other number of ranks."""
        if not self.is_deepspeed_enabled or resume_from_checkpoint is None:
            with trainers.fsdp_layout(self, self.resumed.manifest if self.resumed else None):
                return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        folder = Path(resume_from_checkpoint)
        manifest = self.resumed.manifest if self.resumed else None
        trainers.load_zero(self, folder, manifest, place=self.resume_words[0])
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self._load_scaler(resume_from_checkpoint)
        self._meeting.gather(None)  # all have read what was converted
        prepare_output_dir(str(self.args.output_dir), self._meeting)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with trainers.fits(Path(resume_from_checkpoint), place=self.resume_words[0]):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with trainers.fits(Path(checkpoint or ""), place=self.resume_words[0]):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        trainers.refuse_partial(self.model, load_result, place=self.resume_words[0])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        manifest = self.resumed.manifest if self.resumed else None
        if checkpoint is None or not trainers.load_random_states(Path(checkpoint), manifest, self.accelerator):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if self.stopped_by is None:  # else little time is left
            self._meeting.on_main(lambda: refuse_unsafe_folder(Path(self.state.best_model_checkpoint or "")))
            super()._load_best_model()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's loop asks whether the end is reached after a step; a finished run takes none."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # ── Save ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output_dir, counters = Path(self._get_output_dir(trial)).absolute(), self.counters()
        job = Job(
            output_dir=output_dir,
            manifest=self._manifest(),
            writes=(partial(self._write_checkpoint, model, trial, counters, output_dir),),
            meeting=self._meeting,
            clean_up=lambda: delete_old(
                output_dir,
                keep_last=self.args.save_total_limit or None,
                best=Path(best) if (best := self.state.best_model_checkpoint) else None,
            ),
            check=self._verify_once,
        )
        failure = job.run()
        if failure is None:
            if self._folder_to_push is not None:
                super()._push_from_checkpoint(str(job.folder))
        else:
            line = f"{job.folder.name} was not saved: {failure}"
            if self.stopped_by or self.state.global_step >= self.state.max_steps:
                raise CheckpointNotSaved(line)
            self._say(f"warning: {line}. Older checkpoints are untouched.")
        self._folder_to_push = None

    def _write_checkpoint(
        self, model: Any, trial: Any, counters: dict[str, Any], output_dir: Path, staged: Path
    ) -> None:
        """The Trainer's own files. An error of one rank waits until the others have had their collectives."""
        self._staged_in, self._kept_errors = staged.parent, []
        try:
            with trainers.engine_errors_kept(self, self._kept_errors):
                super()._save_checkpoint(model, trial)
            errors = self._kept_errors
        finally:
            self._staged_in = self._kept_errors = None
        if errors:
            raise errors[0]
        if self.state.best_model_checkpoint == str(staged):  # the Trainer has noted where it was being written
            self.state.best_model_checkpoint = str(output_dir / staged.name)
            if self.args.should_save:
                self.state.save_to_json(str(staged / trainers.TRAINER_STATE))
        if self.args.should_save:
            correct_config(staged)
            record_quantization(staged, quantization_of(self.model))
            trainers.write_counters(staged, counters)

    def _manifest(self) -> Manifest:
        import torch

        return Manifest(
            step=self.state.global_step,
            sequence=0,
            world_size=self._meeting.world_size,
            strategy=strategy_of(self.accelerator),
            layout=trainers.layout_of(self),
            seed=torch.initial_seed(),
            stopped_by=self.stopped_by,
            versions=library_versions(),
            algorithm=fast_algorithm(),
            files={},
            settings=self.run_settings or {},
        )

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged_in) if self._staged_in is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staged_in is not None:  # the upload goes on after the folder has moved
            self._folder_to_push = os.path.basename(checkpoint_folder)
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with trainers.errors_kept(self._kept_errors):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:
            trainers.save_fsdp(self, Path(output_dir), self._kept_errors)
        else:
            with trainers.errors_kept(self._kept_errors):
                super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        with trainers.errors_kept(self._kept_errors):
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with trainers.errors_kept(self._kept_errors):
            trainers.write_random_states(Path(output_dir), self.accelerator)

    def _verify_once(self, folder: Path) -> None:
        if self.verify_first_checkpoint and self.first_verification is None:
            self.first_verification = verify_checkpoint(self.model, folder, accelerator=self.accelerator)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Inside a checkpoint as the trainer's; called by the user, `save_final`."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        verify = self.verify_first_checkpoint and self.first_verification is None
        result = save_final(self, str(output_dir or self.args.output_dir), verify=verify)
        self.first_verification = self.first_verification or result
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
