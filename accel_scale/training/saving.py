"""Saving that can be trusted: atomic checkpoints and final folders, read back and compared the first time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.training.atomic import checkpoint_problems, latest_complete_checkpoint, staging_root
from accel_scale.training.final_model import (
    correct_config,
    make_base_resolvable,
    make_generation_config_savable,
    save_final,
)
from accel_scale.training.gathering import broadcast_from_main, process_index, wait_for_everyone
from accel_scale.training.quantization_record import quantization_of, read_quantization, record_quantization
from accel_scale.training.staging import prepare_output_dir, publish_everywhere, save_atomically
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
    """Put before an HF or TRL trainer class: its checkpoints appear complete or not at all.

    `Trainer._save_checkpoint` writes from several ranks into one folder; here that folder is in a staging
    area until all ranks have finished, then rank 0 publishes it. Rotation (`save_total_limit`),
    `resume_from_checkpoint=True`, `load_best_model_at_end` and pushes to the hub see published folders only.
    `save_model()` becomes `save_final`. The overridden methods were checked on transformers 5.23.

    Attributes:
        verify_first_checkpoint: Read the first thing saved back and compare it with memory.
        first_verification: Outcome of that check, None until then.
    """

    model: Any
    verify_first_checkpoint: bool = True
    first_verification: VerifyResult | None = None
    _staging_checkpoint = False
    _folder_to_push: str | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; removes what a killed run left.

        True resumes the newest complete checkpoint; ``"auto"`` does where there is one, else begins.
        """
        output_dir = str(self.args.output_dir)
        for line in prepare_output_dir(output_dir):
            if process_index() == 0:
                print(f"{output_dir}: {line}")
        make_base_resolvable(self.model)
        make_generation_config_savable(self.model)
        if resume_from_checkpoint is True or resume_from_checkpoint == "auto":
            name = broadcast_from_main(latest_complete_checkpoint(output_dir))
            if name is None and resume_from_checkpoint is True:
                raise ConfigError(
                    f"there is no complete checkpoint in {output_dir}.",
                    place="--resume_from_checkpoint",
                    fix="leave the flag out to start from the beginning.",
                )
            resume_from_checkpoint = name
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = super()._get_output_dir(trial)
        return str(staging_root(run_dir)) if self._staging_checkpoint else run_dir

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging_checkpoint:  # the upload goes on after the folder has moved
            self._folder_to_push = os.path.basename(checkpoint_folder)
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        from transformers.trainer_utils import rotate_checkpoints

        run_dir = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged = staging_root(run_dir) / name
        if process_index() == 0:
            shutil.rmtree(staged, ignore_errors=True)
        wait_for_everyone()
        self._staging_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            if process_index() == 0:  # after a full disk the space is needed at once
                shutil.rmtree(staged, ignore_errors=True)
            raise
        finally:
            self._staging_checkpoint = False
        self._correct_best_checkpoint(staged, run_dir / name)
        if self.args.should_save:
            correct_config(staged)
            record_quantization(staged, quantization_of(self.model))
        wait_for_everyone()
        self._verify_once(staged)
        publish_everywhere(staged, run_dir / name, inside=False)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        if self._folder_to_push is not None:
            super()._push_from_checkpoint(str(run_dir / self._folder_to_push))
            self._folder_to_push = None

    def _correct_best_checkpoint(self, staged: Path, folder: Path) -> None:
        """The Trainer has noted where the best checkpoint was being written: note where it will be."""
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(folder)
            if self.args.should_save:
                self.state.save_to_json(str(staged / "trainer_state.json"))

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
