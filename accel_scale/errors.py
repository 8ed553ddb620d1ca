"""The exceptions that users are meant to see."""

from __future__ import annotations

from accel_scale.secrets import mask


class ConfigError(ValueError):
    """A setting that cannot be honoured: says what is wrong, where, and what to change.

    Args:
        problem: One sentence naming the value and why it cannot be used.
        place: Where it was set, e.g. ``recipes/configs/qlora.yaml:12`` or ``--optim``.
        fix: What to write instead, as an imperative sentence.
    """

    def __init__(self, problem: str, *, place: str | None = None, fix: str | None = None) -> None:
        if problem.startswith("Caught ") and "DataLoader worker" in problem:
            # torch re-raises a worker's exception with the worker's traceback in place of the arguments.
            problem = problem.strip().splitlines()[-1].partition(": ")[2]
        self.problem, self.place, self.fix = problem, place, fix
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """``place: problem. Fix: fix`` on one line, without credentials."""
        text = f"{self.place}: {self.problem}" if self.place else self.problem
        return mask(f"{text} Fix: {self.fix}" if self.fix else text)


class NotRunError(ConfigError):
    """A model's class takes no step with a setting, although it may with others."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class, without a full stop."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__).rstrip(".")


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message, on one line."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")
