"""The one exception users are meant to see, and how it is printed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from accel_scale.secrets import mask

# sysexits.h's EX_IOERR, as where the last checkpoint could not be written.
FULL_DISK_STATUS = 74


class ConfigError(ValueError):
    """A setting that cannot be honoured: says what is wrong, where, and what to change.

    Args:
        problem: One sentence naming the value and why it cannot be used.
        place: Where it was set, e.g. ``recipes/configs/qlora.yaml:12`` or ``--optim``.
        fix: What to write instead, as an imperative sentence.
    """

    def __init__(self, problem: str, *, place: str | None = None, fix: str | None = None) -> None:
        self.problem, self.place, self.fix = problem, place, fix
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """``place: problem. Fix: fix`` on one line, without credentials."""
        text = f"{self.place}: {self.problem}" if self.place else self.problem
        return mask(f"{text} Fix: {self.fix}" if self.fix else text)


@contextlib.contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turn a `ConfigError`, or a library's error that is one, into a line on stderr of one process, and status 2.

    A full disk is one too, with status 74, and memory that ran out, with 75. Everything else gets through; under a
    launcher, whose report comes after the traceback, its cause is said again.
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
            raise SystemExit(2 if full is None else FULL_DISK_STATUS) from None
        _say_if_out_of_memory(program, error)
        repeat_cause(program, error)
        raise


def _say_if_out_of_memory(program: str, error: Exception) -> None:
    if "torch" not in sys.modules:
        return
    from accel_scale.ending.clean_stop import OUT_OF_MEMORY_STATUS
    from accel_scale.ending.last_word import say_last
    from accel_scale.ending.out_of_memory import REMEDIES, is_out_of_memory, reason_in

    if is_out_of_memory(error):
        say_last(f"{program}: memory ran out ({reason_in(error)}). Fix: {REMEDIES}.", all_ranks=True)
        raise SystemExit(OUT_OF_MEMORY_STATUS) from None
