"""Measurements that were found after the planner's constants had been set: nothing is fitted to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list:
    import later_rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return later_rows.load()


def test_rows_that_nothing_was_fitted_to_are_predicted(rows: list) -> None:
    import later_rows

    allocated, reserved, device = (later_rows.summary(rows, metric) for metric in later_rows.METRICS)
    assert [figures["rows"] for figures in (allocated, reserved, device)] == [72, 55, 48]
    assert allocated["median_error"] < 0.05
    assert reserved["median_error"] < 0.09
    assert device["median_error"] < 0.06
    # Without the blocks that the allocator keeps.
    assert reserved["before"] > 1.2 * reserved["median_error"]
    assert device["before"] > 2 * device["median_error"]
    for figures in (allocated, reserved, device):
        assert figures["inside"] >= 0.85
        assert figures["direction"] >= 0.93


def test_no_later_out_of_memory_error_is_said_to_fit(rows: list) -> None:
    lost = [row for row in rows if not row.measured]
    assert len(lost) == 18
    assert not any(row.is_said_to_fit for row in lost)


def test_what_ran_is_seldom_said_not_to_fit(rows: list) -> None:
    ran = [row for row in rows if row.measured]
    assert sum(row.is_said_to_fit for row in ran) > 0.75 * len(ran)


def test_steps_take_as_long_as_planned(rows: list) -> None:
    import later_rows

    figures = later_rows.times(rows)
    assert figures["rows"] >= 90
    assert figures["median_error"] <= 0.15
    assert figures["inside"] >= 0.8
    of_t4 = later_rows.times([row for row in rows if "fitcheck" in row.source])
    assert of_t4["median_error"] <= 0.15


def test_the_committed_page_is_what_the_script_writes(rows: list) -> None:
    import later_rows

    assert later_rows.markdown(rows) == later_rows.RESULTS.read_text(encoding="utf-8")
