"""Which bucket size is suggested, and which models are refused before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_scale.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from ddp_buckets import SweepSettings, best_cap, parse, run


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0, 25: 1.02, 100: 1.5}, 25),  # torch's own is hardly slower: no flag is worth it
        ({1: 1.0, 25: 1.05, 100: 1.5}, 1),
        ({5: 1.3, 100: 1.2}, 100),
    ],
)
def test_the_suggestion(seconds: dict[float, float], expected: float) -> None:
    assert best_cap([{"bucket_cap_mb": cap, "seconds": time} for cap, time in seconds.items()]) == expected


def test_models_that_cannot_be_are_refused_at_once() -> None:
    SweepSettings(None, 3e6, (25.0,)).check(2)
    with pytest.raises(ConfigError, match=r"use --num_params \d+M or less"):
        SweepSettings(None, 1e15, (25.0,)).check(2)
    with pytest.raises(ConfigError, match="no sensible shape"):
        SweepSettings(None, 1e4, (25.0,)).check(2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "nothing says which model"),
        (["--model", "a", "--num_params", "1M"], "both say which model"),
        (["--model", "meta-llama/Llama-3.1-405B", "--processes", "2"], "do not fit here"),
    ],
)
def test_bad_flags_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(parse(words))
