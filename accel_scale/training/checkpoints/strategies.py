"""Match checkpoints to runs: the strategy that wrote them, and what must agree to load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.facts.strategies import STRATEGIES, Strategy
from accel_scale.training.checkpoints.contents import Contents, ReplicatedContents, schedules
from accel_scale.training.checkpoints.folders import Found

if TYPE_CHECKING:
    from accelerate import Accelerator


def contents_of(accelerator: Accelerator, strategy: Strategy) -> Contents:
    """The `Contents` that write and load weights and optimizers under `strategy`.

    Raises:
        ConfigError: if this configuration is not supported.
    """
    if strategy.is_replicated:
        return ReplicatedContents(accelerator)
    if strategy.is_model_parallel:
        from accel_scale.training.checkpoints.parallel import ParallelContents

        return ParallelContents(accelerator)
    if strategy.is_fsdp:
        from accel_scale.training.checkpoints.fsdp import FsdpContents

        return FsdpContents(accelerator)
    from accel_scale.training.checkpoints.zero import ZeroContents

    return ZeroContents(accelerator)


def contents_written_by(found: Found, accelerator: Accelerator, own: Contents) -> Contents:
    """The `Contents` that load `found`; `own` are this run's. Model parallelism stores the plain, whole model."""
    if not STRATEGIES[found.manifest.strategy].is_model_parallel:
        return own
    from accel_scale.training.checkpoints.parallel import ParallelContents

    return own if isinstance(own, ParallelContents) else ParallelContents(accelerator)


def check_fit(found: Found, strategy: Strategy, stored: set[str], registered: set[str]) -> None:
    """Refuse a checkpoint that this run could load only in part.

    Raises:
        ConfigError: if the strategy or the registered objects differ.
    """
    written_by = found.manifest.strategy
    if not strategy.loads_checkpoints_of(written_by):
        raise ConfigError(
            f"{found.folder.name} was written under {written_by}, this run is {strategy.name}.",
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


def check_schedules(accelerator: Accelerator, found: Found) -> None:
    """Refuse a schedule that would continue at another speed.

    Unless told otherwise, Accelerate steps a prepared schedule once per rank at every optimizer step
    (`AcceleratedScheduler.step`, 1.15), so its count is meaningless on another number of ranks.

    Raises:
        ConfigError: if there is such a schedule and the number of ranks has changed.
    """
    before, now = found.manifest.world_size, accelerator.num_processes
    if before == now:
        return
    for scheduler in schedules(accelerator):
        if getattr(scheduler, "step_with_optimizer", False) and not scheduler.split_batches:
            raise ConfigError(
                f"the schedule counts {before} at every step of {found.folder.name} and would now count {now}.",
                place="accelerator.prepare(scheduler)",
                fix="make it in optimizer steps, and call accel_scale.plugin.preparing.step_once_per_update on it.",
            )


def refuse_other_savers(accelerator: Accelerator) -> None:
    """Refuse objects and hooks that `accelerator.save_state` would handle and this manager would not.

    Raises:
        ConfigError: if there are any.
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
