"""The one exception users are meant to see, and how it is printed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


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
        """``place: problem. Fix: fix`` on one line."""
        text = f"{self.place}: {self.problem}" if self.place else self.problem
        return f"{text} Fix: {self.fix}" if self.fix else text


@contextlib.contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turn a `ConfigError` into one line on stderr of rank 0 and exit status 2; let everything else through."""
    try:
        yield
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{program}: error: {error.one_line()}", file=sys.stderr)
        raise SystemExit(2) from None
