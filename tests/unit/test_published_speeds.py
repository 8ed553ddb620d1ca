"""Step times on published speeds are as good as the committed page says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.mark.slow
def test_published_speeds_are_predicted() -> None:
    import published_speeds

    board = published_speeds.scoreboard()
    assert board["all"]["rows"] >= 120
    assert board["all"]["median_error"] <= 0.15
    assert board["all"]["inside"] >= 0.8
    assert published_speeds.markdown(board) == published_speeds.RESULTS.read_text()
    assert board == json.loads(published_speeds.RESULTS.with_suffix(".json").read_text())
