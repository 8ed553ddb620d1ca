"""How a recipe ends when it cannot continue: one line from one process, and a documented status."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def exit_if_not_saved(program: str) -> Iterator[None]:
    """Turn a last checkpoint that could not be written into one line and `EXIT_NOT_SAVED`."""
    from accel_scale.ending.last_word import say_last
    from accel_scale.training.checkpoints.manager import EXIT_NOT_SAVED, CheckpointNotSaved

    try:
        yield
    except CheckpointNotSaved as error:
        if os.environ.get("RANK", "0") == "0":
            say_last(f"{program}: error: {error}")
        raise SystemExit(EXIT_NOT_SAVED) from None
