"""``--collective_timeout``: the process group's timeout, and the watch that names the missing rank."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.errors import ConfigError
from accel_scale.training.resilience.hang_watch import (
    BACKEND_MARGIN_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    HangWatch,
    follow_steps,
)
from accel_scale.units import parse_duration

if TYPE_CHECKING:
    from accelerate import Accelerator

PLACE = "--collective_timeout"


def timeout_seconds(text: str | None) -> float:
    """Parse ``10m`` into seconds; returns the default for None.

    Raises:
        ConfigError: if it is not a duration.
    """
    return DEFAULT_TIMEOUT_SECONDS if text is None else parse_duration(text, place=PLACE)


def backend_timeout(text: str | None) -> timedelta:
    """For `init_process_group`: later than the watch, which names rank, step and operation, as backends do not."""
    return timedelta(seconds=math.ceil(timeout_seconds(text) + BACKEND_MARGIN_SECONDS))


def watch_accelerator(accelerator: Accelerator, text: str | None, program: str) -> HangWatch:
    """Watch the ranks until `accelerator.end_training`; `GuardedStep` and `StepCallback` report the steps."""
    watch = HangWatch(program, timeout_seconds(text)).start()
    end_training = accelerator.end_training

    def end() -> None:
        watch.close()
        let_go_of_collectives()
        end_training()

    accelerator.end_training = end
    return watch


class StepCallback(TrainerCallback):
    """Tells the watch the current step of a trainer."""

    def __init__(self) -> None:
        self._step = 0

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._step = state.global_step + 1
        follow_steps(lambda: self._step)

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._step = state.global_step + 1


def settle_timeouts(args: Any) -> None:
    """Set one timeout for a trainer's ranks: ``collective_timeout`` for the watch, ``ddp_timeout`` for the backend.

    Raises:
        ConfigError: if both are given, or one is not a duration.
    """
    if args.collective_timeout is None:
        args.collective_timeout = f"{args.ddp_timeout}s"
    backend_seconds = int(backend_timeout(args.collective_timeout).total_seconds())
    own = args.collective_timeout == f"{args.ddp_timeout}s"
    if not own and args.ddp_timeout not in (DEFAULT_TIMEOUT_SECONDS, backend_seconds):
        raise ConfigError(
            "--ddp_timeout and --collective_timeout both say how long ranks wait.",
            place=PLACE,
            fix="keep --collective_timeout.",
        )
    args.ddp_timeout = backend_seconds
