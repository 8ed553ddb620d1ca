"""Atomic checkpoints and final folders inside HF `Trainer`, with the first one read back and compared."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from accel_scale.ending.last_word import repeat_last
from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.ending.user_errors import CheckpointNotSaved
from accel_scale.facts.exit_statuses import EXIT_STOPPED
from accel_scale.modeling.quantization_record import quantization_of, record_quantization
from accel_scale.parallel.engine import strategy_of
from accel_scale.trainers import checkpoint_trainer as trainers
from accel_scale.trainers.resume_mixin import ResumeMixin
from accel_scale.training.checkpoints.folders import delete_old
from accel_scale.training.checkpoints.manifest import Manifest
from accel_scale.training.checkpoints.pickles import refuse_unsafe_folder
from accel_scale.training.checkpoints.ranks import Meeting
from accel_scale.training.checkpoints.signals import StopSignals
from accel_scale.training.checkpoints.staging import prepare_output_dir
from accel_scale.training.checkpoints.writing import Job
from accel_scale.training.saving.final_model import (
    correct_config,
    make_base_resolvable,
    make_generation_config_savable,
    save_final,
)
from accel_scale.training.saving.verification import VerifyResult, verify_checkpoint


class AtomicSavingMixin(ResumeMixin):
    """Mixin for an HF or TRL trainer class: its checkpoints are kept, checked and resumed as `CheckpointManager`'s.

    `Trainer._save_checkpoint` writes from several ranks into one folder; here that folder stays in a staging area
    until all ranks have finished, gets a manifest with checksums of every file, and is renamed. A save that fails on
    any rank prints one line, and the run continues; a failing last save raises `CheckpointNotSaved`. On SIGTERM,
    SIGUSR1 and Ctrl-C `train` saves, stops and ends the process with `EXIT_STOPPED`. `save_model()` becomes
    `save_final`. The overridden methods were checked on transformers 5.23.

    Attributes:
        verify_first_checkpoint: Read the first save back and compare it with the weights in memory.
        first_verification: Result of that check; None until then.
        pushes_when_saved: True if `save_model` also pushes, as the trainer's does; otherwise the run's report does.
        stopped_by: Name of the signal that stopped the run; None before.
    """

    model: Any
    verify_first_checkpoint: bool = True
    first_verification: VerifyResult | None = None
    pushes_when_saved: bool = True
    _stop: trainers.StopCallback | None = None
    _staged_in: Path | None = None
    _kept_errors: list[Exception] | None = None
    _folder_to_push: str | None = None

    @property
    def stopped_by(self) -> str | None:
        number = self._stop.number if self._stop is not None else 0
        return signal.Signals(number).name if number else None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; removes a killed run's leftovers first, and saves and stops on a signal.

        True resumes the newest good checkpoint; ``"auto"`` does so if there is one, and otherwise starts anew.
        """
        self._meeting, self.resumed = Meeting(), None
        output_dir = Path(str(self.args.output_dir)).absolute()
        for line in prepare_output_dir(output_dir, self._meeting):
            self._say(f"{output_dir}: {line}")
        make_base_resolvable(self.model)
        make_generation_config_savable(self.model)
        self._settings = trainers.trainer_settings(self) if self.run_settings is None else self.run_settings
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
        """End every process with the exit status of a stopped run that can be resumed."""
        line = f"saved checkpoint-{self.state.global_step} after {self.stopped_by}; {self.resume_words[2]}"
        self._say(line)
        repeat_last(line)
        self._meeting.gather(None)  # the launcher ends the others as soon as one has left
        let_go_of_collectives()
        self.accelerator.end_training()
        raise SystemExit(EXIT_STOPPED)

    def _load_best_model(self) -> None:
        self._meeting.on_main(lambda: refuse_unsafe_folder(Path(self.state.best_model_checkpoint or "")))
        super()._load_best_model()

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
        """Write the Trainer's own files. An error on one rank is kept until all have finished their collectives."""
        self._staged_in, self._kept_errors = staged.parent, []
        try:
            with trainers.engine_errors_kept(self, self._kept_errors):
                super()._save_checkpoint(model, trial)
            errors = self._kept_errors
        finally:
            self._staged_in = self._kept_errors = None
        if errors:
            raise errors[0]
        if self.state.best_model_checkpoint == str(staged):  # the Trainer has recorded the staging folder
            self.state.best_model_checkpoint = str(output_dir / staged.name)
            if self.args.should_save:
                self.state.save_to_json(str(staged / trainers.TRAINER_STATE))
        if self.args.should_save:
            correct_config(staged)
            record_quantization(staged, quantization_of(self.model))
            trainers.write_counters(staged, counters)

    def _manifest(self) -> Manifest:
        return Manifest.of_run(
            self.state.global_step,
            world_size=self._meeting.world_size,
            strategy=strategy_of(self.accelerator).name,
            layout=trainers.layout_of(self),
            stopped_by=self.stopped_by,
            settings=self._settings,
        )

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged_in) if self._staged_in is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staged_in is not None:  # the upload continues after the folder has moved
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
        """Called by the Trainer, save as usual within a checkpoint; called by the user, run `save_final`."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        verify = self.verify_first_checkpoint and self.first_verification is None
        result = save_final(self, str(output_dir or self.args.output_dir), verify=verify)
        self.first_verification = self.first_verification or result
        if self.args.push_to_hub and self.pushes_when_saved:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
