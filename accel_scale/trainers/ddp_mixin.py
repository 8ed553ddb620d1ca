"""DDP's communication in HF `Trainer`: the hook of ``--ddp_comm_hook`` and its state in every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_scale.training.checkpoints.hook_states import capture_hook_states, load_hook_states
from accel_scale.training.ddp.hooks import DdpSettings, use_ddp_settings


class DdpHookMixin:
    """Mixin for an HF or TRL trainer class: the hook of `args.ddp_comm_hook`, and its state in every checkpoint.

    `_save_rng_state` and `_load_rng_state` are called on every rank for its own states (transformers 5.23;
    tests/distributed/test_ddp_hooks.py fails if that changes).
    """

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        use_ddp_settings(self.accelerator, DdpSettings.of(self.args))  # type: ignore[attr-defined]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        capture_hook_states(self.accelerator, copy=False)(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            load_hook_states(self.accelerator, Path(checkpoint))
