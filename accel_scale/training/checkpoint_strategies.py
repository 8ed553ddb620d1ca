"""Which checkpoints belong to which run: the strategy that writes them, and what must agree to load them."""

from __future__ import annotations

from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.training.checkpoint_contents import Contents, ReplicatedContents
from accel_scale.training.checkpoint_folders import Found


def contents_of(accelerator: Any, strategy: str) -> Contents:
    """How `strategy` writes and loads weights and optimizers.

    Raises:
        ConfigError: if it cannot, in this configuration.
    """
    if strategy in ("single", "ddp"):
        return ReplicatedContents(accelerator)
    if strategy.startswith("fsdp"):
        from accel_scale.training.checkpoint_fsdp import FsdpContents

        return FsdpContents(accelerator)
    from accel_scale.training.checkpoint_zero import ZeroContents

    return ZeroContents(accelerator)


def check_fit(found: Found, strategy: str, stored: set[str], registered: set[str]) -> None:
    """Refuse a checkpoint that this run could only load in part.

    Raises:
        ConfigError: if strategy or registered objects are others.
    """
    replicated = {"single", "ddp"}
    written_by = found.manifest.strategy
    if written_by != strategy and not {written_by, strategy} <= replicated:
        raise ConfigError(
            f"{found.folder.name} was written under {written_by}, this run is {strategy}.",
            place="resume",
            fix=f"launch it with {written_by}, or start from the model it saved.",
        )
    if stored != registered:
        names = ", ".join(sorted(stored ^ registered))
        raise ConfigError(
            f"{found.folder.name} and this run differ in what is registered: {names}.",
            place="resume",
            fix="register the same objects before resuming.",
        )


def refuse_other_savers(accelerator: Any) -> None:
    """Refuse what `accelerator.save_state` would save and this manager would leave out.

    Raises:
        ConfigError: if there is any.
    """
    if accelerator._custom_objects:
        raise ConfigError(
            "Accelerate pickles what is registered for checkpointing, and this manager does not load pickles.",
            place="accelerator.register_for_checkpointing",
            fix="use CheckpointManager.register.",
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise ConfigError(
            "hooks of save_state and load_state are not called by this manager.",
            place="accelerator.register_save_state_pre_hook",
            fix="use CheckpointManager.register.",
        )
