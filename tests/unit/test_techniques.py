"""docs/techniques.md: the page follows from its rows, the rows from the planner, and every claim has a row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import technique_page  # noqa: E402
import technique_rows  # noqa: E402
import techniques  # noqa: E402
from technique_claims import read_claims  # noqa: E402

# Quality after the same number of steps: measured by recipes/sft.py, half an hour on two cores.
NOT_YET = set()


@pytest.fixture(scope="module")
def stages():
    return techniques.stages()


def test_the_page_is_what_the_rows_give(stages):
    """Run `python benchmarks/techniques.py --page` to rewrite it."""
    assert techniques.PAGE.read_text(encoding="utf-8") == technique_page.page(stages, techniques.read_rows())


def test_every_claim_is_answered_by_rows_that_a_stage_fills_or_says_why_not(stages):
    filled = {name for stage in stages.values() for work in stage.works for name in work.rows}
    for claim in read_claims():
        assert claim.figures or claim.note, claim.stated
        assert not claim.figures or {row for row, _ in claim.figures} & filled or "/" in claim.figures[0][0], (
            claim.stated
        )


def test_formulas_and_predictions_are_todays(stages):
    """Run `python benchmarks/techniques.py --stages arithmetic predicted` to rewrite them.

    Predictions may drift a little: the page is useful as long as it says what a user's own plan would say.
    """
    rows = techniques.read_rows()
    for name, tolerance in (("arithmetic", 1e-5), ("predicted", 0.05)):
        for work in stages[name].works:
            for row, values in work.run().items():
                committed = rows[row]["values"]
                assert committed.keys() == values.keys(), row
                numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
                found = {key: committed[key] for key in numbers}
                assert found == pytest.approx(numbers, rel=tolerance, abs=0.02 if tolerance > 0.01 else 1e-9), row


def test_a_run_that_was_interrupted_goes_on_where_it_was(stages):
    stage, rows = stages["arithmetic"], {}
    first, *others = stage.works

    def interrupted(found):
        rows.update(found)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        techniques.run(stage, rows, again=False, save=interrupted)
    assert set(rows) == set(first.rows)
    page = technique_page.page(stages, rows)
    assert "| fp32 with Adam: 4 + 4 + 8 = 16 B | 16 B |" in page
    assert technique_page.MISSING in page
    saved = []
    techniques.run(stage, rows, again=False, save=saved.append)
    assert [set(found) for found in saved] == [set(work.rows) for work in others]


def test_what_fails_is_said_and_the_rest_is_measured():
    def fail():
        raise RuntimeError("no answer")

    works = (technique_rows.Work(("a",), fail), technique_rows.Work(("b",), lambda: {"b": {"x": 1 / 3}}))
    saved = []
    stage = technique_rows.Stage("s", "measured", "", works)
    assert techniques.run(stage, {}, again=False, save=saved.append) == ["a: no answer"]
    assert saved[0]["b"]["values"] == {"x": 0.333333}
    assert saved[0]["b"]["kind"] == "measured"
    assert "torch" in saved[0]["b"]["versions"]
