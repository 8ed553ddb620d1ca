"""Verifiable rewards: functions of completions and expected answers, by name or from a user's file."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.flags.rewards import FORMAT_PREFIX, NAMED_REWARDS, check_rewards
from accel_scale.training.evaluation.exact_match import normalize_answer

Completion = str | Sequence[Mapping[str, str]]  # text, or turns
# Called by TRL with named lists of equal length; one number (or None: not judged) for each completion.
RewardFunction = Callable[..., Sequence[float | None]]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FLAG = "--rewards"


def text_of(completion: Completion) -> str:
    """The text of a completion, which is text or turns."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact_match(completions: Sequence[Completion], answer: Sequence[str], **unused: object) -> list[float]:
    """1 if a completion equals the answer after `normalize_answer`, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(normalize_answer(text_of(said)) == normalize_answer(expected)) for said, expected in pairs]


def number(completions: Sequence[Completion], answer: Sequence[str], **unused: object) -> list[float | None]:
    """1 if the last number of a completion equals the answer's last number, else 0; None if the answer has none."""
    rewards: list[float | None] = []
    for said, expected in zip(completions, answer, strict=True):
        wanted, found = last_number(expected), last_number(text_of(said))
        rewards.append(None if wanted is None else float(found == wanted))
    return rewards


def last_number(text: str) -> float | None:
    """The last number in `text`, without commas between digits; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def matches(pattern: str) -> RewardFunction:
    """Return a reward of 1 if the whole completion, across lines, matches `pattern`, else 0."""
    compiled = re.compile(pattern, re.DOTALL)

    def format_reward(completions: Sequence[Completion], **unused: object) -> list[float]:
        return [float(compiled.fullmatch(text_of(said).strip()) is not None) for said in completions]

    return format_reward


def reward_functions(names: Sequence[str], *, weights: Sequence[float] | None = None) -> list[RewardFunction]:
    """The functions of ``--rewards``, in the given order.

    Args:
        names: Values of the flag.
        weights: Values of ``--reward_weights``, one for each name.

    Raises:
        ConfigError: as in `check_rewards`; for a function that does not exist, or a file that cannot be imported.
    """
    check_rewards(names, weights)
    return [_function(name) for name in names]


def _function(name: str) -> RewardFunction:
    own: dict[str, RewardFunction] = dict(zip(NAMED_REWARDS, (exact_match, number), strict=True))
    if name in own:
        return own[name]
    if name.startswith(FORMAT_PREFIX):
        return matches(name.removeprefix(FORMAT_PREFIX))
    where, _, function = name.rpartition(":")
    found = getattr(_module(where), function, None)
    if not callable(found):
        raise ConfigError(f"{where} has no function {function}.", place=_FLAG, fix="check the name.")
    return found  # type: ignore[no-any-return]


def _module(where: str) -> object:
    """Import a module by its name, or from a file that the user has named to be run."""
    path = Path(where)
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(f"rewards_of_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look it up
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{where} cannot be imported: {type(error).__name__}: {error}.", place=_FLAG, fix="correct the file."
        ) from error
    return module
