"""Which bucket size is suggested, and which models are refused before anything is started."""

from __future__ import annotations

import pytest

from accel_scale.errors import ConfigError
from accel_scale.measuring.ddp_buckets import SweepSettings, best_cap


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
