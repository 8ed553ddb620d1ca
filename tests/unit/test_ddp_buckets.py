"""Which bucket size is suggested, and which models are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_scale.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import zero_buckets
from bucket_steps import SweepSettings
from ddp_buckets import best_cap, conclusion, parse, run


@pytest.mark.parametrize(
    ("seconds", "noise", "expected", "says"),
    [
        ({1: 1.0, 25: 1.02, 100: 1.5}, 0.0, 25, "no other size"),  # barely slower: not worth a flag
        ({1: 1.0, 25: 1.05, 100: 1.5}, 0.01, 1, "use --ddp_bucket_cap_mb 1, 5% faster"),
        ({1: 1.0, 25: 1.05, 100: 1.5}, 0.08, 25, "within the noise of 8.0%"),
        ({1: 1.0, 25: 1.05, 100: 1.06}, 0.08, 25, "noise: the sizes differ by 6.0% at most"),
        ({5: 1.3, 100: 1.2}, 0.02, 100, "use --ddp_bucket_cap_mb 100"),
    ],
)
def test_the_suggestion(seconds: dict[float, float], noise: float, expected: float, says: str) -> None:
    rows = [{"bucket_cap_mb": cap, "seconds": time, "noise": noise} for cap, time in seconds.items()]
    assert best_cap(rows) == expected
    assert says in conclusion(rows)


@pytest.mark.parametrize(
    ("stage", "seconds", "noise", "says"),
    [
        (2, {(10**6, False): 1.0, (5 * 10**8, False): 1.05}, 0.08, "noise: the sizes differ by 5.0% at most"),
        (2, {(10**6, True): 1.0, (5 * 10**8, False): 1.2}, 0.05, "1,000,000, overlapped is 20% faster"),
        (2, {(10**6, True): 1.0, (5 * 10**8, False): 1.02, (10**5, False): 1.3}, 0.05, "100,000 is 27% slower"),
        (3, {(10**6, True): 1.0, (5 * 10**8, True): 1.2}, 0.05, "1,000,000, overlapped is 20% faster"),
        (3, {(10**6, True): 1.0, (5 * 10**8, False): 1.2}, 0.05, "500,000,000 20% slower (noise 5.0%)"),
    ],
)
def test_what_is_said_of_deepspeeds(
    stage: int, seconds: dict[tuple[int, bool], float], noise: float, says: str
) -> None:
    rows = [zero_buckets.Timed(size, overlap, time, noise) for (size, overlap), time in seconds.items()]
    assert says in zero_buckets.conclusion(stage, rows)


def test_the_page_of_results_is_that_of_the_measurements() -> None:
    import json

    kept = json.loads(zero_buckets.DATA.read_text(encoding="utf-8"))
    assert set(kept) == {"zero2", "zero3"}
    assert zero_buckets.PAGE.read_text(encoding="utf-8") == zero_buckets.page(kept)


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
        (["--num_params", "1M", "--write"], "--write: does nothing for DDP"),
        (["--num_params", "1M", "--buckets", "1M"], "--buckets: does nothing for DDP"),
    ],
)
def test_bad_flags_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(parse(words))
