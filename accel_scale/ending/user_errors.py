"""How a program ends for its user when it cannot continue: one line from one process, and a documented status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import CONFIG_STATUS, FULL_DISK_STATUS, OUT_OF_MEMORY_STATUS


@contextlib.contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turn a `ConfigError`, or an equivalent error of a library, into one process's line on stderr and status 2.

    The same goes for a full disk, with status 74, and running out of memory, with 75. All other errors pass through;
    under a launcher, whose report comes after the traceback, the cause is printed again.
    """
    from accel_scale.ending.last_word import credentials_unsaid

    with credentials_unsaid():
        yield from _user_errors(program)


def _user_errors(program: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        from accel_scale.disk_space import full_disk
        from accel_scale.ending.known_errors import as_setting
        from accel_scale.ending.last_word import repeat_cause, say_last

        full = None if isinstance(error, ConfigError) else full_disk(error)
        known = full or as_setting(error)
        if known is not None:
            say_last(f"{program}: error: {known.one_line()}", all_ranks=True)
            raise SystemExit(CONFIG_STATUS if full is None else FULL_DISK_STATUS) from None
        _say_if_out_of_memory(program, error)
        repeat_cause(program, error)
        raise


def _say_if_out_of_memory(program: str, error: Exception) -> None:
    if "torch" not in sys.modules:
        return
    from accel_scale.ending.last_word import say_last
    from accel_scale.ending.out_of_memory import REMEDIES, is_out_of_memory, reason_in

    if is_out_of_memory(error):
        say_last(f"{program}: memory ran out ({reason_in(error)}). Fix: {REMEDIES}.", all_ranks=True)
        raise SystemExit(OUT_OF_MEMORY_STATUS) from None


@contextlib.contextmanager
def exit_if_not_saved(program: str) -> Iterator[None]:
    """Turn a last checkpoint that could not be written into one line and `FULL_DISK_STATUS`."""
    from accel_scale.ending.last_word import say_last

    try:
        yield
    except CheckpointNotSaved as error:
        if os.environ.get("RANK", "0") == "0":
            say_last(f"{program}: error: {error}")
        raise SystemExit(FULL_DISK_STATUS) from None


class CheckpointNotSaved(OSError):
    """The last checkpoint of a run could not be written.

    Attributes:
        exit_status: Exit status of the program.
    """

    exit_status = FULL_DISK_STATUS
