"""A trainer's output folder: other files in it are not overwritten, and no second run uses it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.launching.run_folder import OutputFolder, is_own, record_written
from accel_scale.modeling.gathering import process_index

if TYPE_CHECKING:
    from transformers import Trainer

    _TrainerBase = Trainer
else:
    _TrainerBase = object


class OutputFolderMixin(_TrainerBase):
    """Mixin for an HF or TRL trainer class: `train` refuses a folder with other content, and locks its folder.

    A README.md that this run did not write is kept; TRL 1.16 overwrites it with its model card at every checkpoint.
    """

    model: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, holding the output folder."""
        with self._output_folder(resume_from_checkpoint).taken(is_main=process_index() == 0):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _output_folder(self, resume_from_checkpoint: str | bool | None) -> OutputFolder:
        source = str(getattr(getattr(self.model, "config", None), "name_or_path", "") or "")
        return OutputFolder(
            Path(str(self.args.output_dir)),
            Path(sys.argv[0]).name or "a script",
            {"the model": [source]} if source else {},
            resumes_from=str(resume_from_checkpoint) if resume_from_checkpoint else None,
            place="output_dir",
        )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Create the model card, unless there is a README.md written by someone else."""
        path = Path(str(self.args.output_dir)) / "README.md"
        if is_own(path):
            super().create_model_card(*args, **kwargs)
            if self.is_world_process_zero():
                record_written(path)
