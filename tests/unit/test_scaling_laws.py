"""Published laws reproduce their published numbers, plans agree with each other, and fits recover known laws."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from xml.dom import minidom

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.planning.laws import scaling_fit
from accel_scale.planning.laws.reference_tables import reference_tables
from accel_scale.planning.laws.scaling_fit import FittedRun, draw_fit, fit_runs, read_runs
from accel_scale.planning.laws.scaling_laws import LAWS, LossLaw, find_law, parse_count, plan_scaling


def test_seven_billion_parameters_want_140_billion_tokens() -> None:
    for params, tokens in ((7e9, 140e9), (70e9, 1.4e12)):
        assert plan_scaling("rule", params=params).tokens == pytest.approx(tokens)
        assert plan_scaling("rule", tokens=tokens).params == pytest.approx(params)
        assert plan_scaling("refit", params=params).tokens == pytest.approx(tokens, rel=0.1)
    assert plan_scaling("rule", compute=5.88e21).params == pytest.approx(math.sqrt(5.88e21 / 120))


def test_compute_table() -> None:
    rows = {row[0]: row[1:] for row in reference_tables()["compute"]}
    assert rows[7] == (pytest.approx(140), pytest.approx(6 * 7e9 * 140e9))
    assert rows[70] == (pytest.approx(1400), pytest.approx(6 * 70e9 * 1.4e12))


def test_published_losses() -> None:
    """Chinchilla (70B, 1.4T) beats Gopher (280B, 300B) at about the same compute, under both fits."""
    for name in ("chinchilla", "refit"):
        law = LAWS[name]
        chinchilla, gopher = law.loss(70e9, 1.4e12), law.loss(280e9, 300e9)
        assert chinchilla is not None
        assert gopher is not None
        assert chinchilla < gopher
    # By hand: 1.69 + 406.4/70e9^0.34 + 410.7/1.4e12^0.28.
    assert LAWS["chinchilla"].loss(70e9, 1.4e12) == pytest.approx(1.69 + 0.0837 + 0.1627, abs=2e-3)


def test_kaplan_wants_larger_models_on_less_data() -> None:
    kaplan, refit = plan_scaling("kaplan", compute=1e23), plan_scaling("refit", compute=1e23)
    assert kaplan.params > 3 * refit.params
    assert plan_scaling("kaplan", compute=8.64e19).params == pytest.approx(1.3e9)


@given(st.sampled_from(sorted(LAWS)), st.floats(1e18, 1e26))
def test_plans_agree_whichever_quantity_is_given(law: str, compute: float) -> None:
    plan = plan_scaling(law, compute=compute)
    assert 6 * plan.params * plan.tokens == pytest.approx(compute)
    for again in (plan_scaling(law, params=plan.params), plan_scaling(law, tokens=plan.tokens)):
        assert again.compute == pytest.approx(compute, rel=1e-6)
        assert again.params == pytest.approx(plan.params, rel=1e-6)
    assert plan_scaling(law, params=plan.params, compute=compute).tokens == pytest.approx(plan.tokens)


@given(st.sampled_from(["chinchilla", "refit"]), st.floats(1e18, 1e26), st.floats(1.05, 30), st.booleans())
def test_no_neighbour_on_the_same_compute_is_better(law: str, compute: float, factor: float, larger: bool) -> None:
    best = plan_scaling(law, compute=compute)
    params = best.params * factor if larger else best.params / factor
    other = plan_scaling(law, params=params, compute=compute)
    assert best.loss is not None
    assert other.loss is not None
    assert other.extra_compute is not None
    assert best.loss < other.loss
    assert other.extra_compute > 0
    assert best.extra_compute == pytest.approx(0, abs=1e-6)


def test_over_training_costs_what_the_loss_says() -> None:
    """The least compute for a run's loss, spent at the optimum, reaches that loss."""
    plan = plan_scaling("refit", params=7e9, tokens=2e12)
    assert plan.extra_compute is not None
    least = plan_scaling("refit", compute=plan.compute / (1 + plan.extra_compute))
    assert least.loss == pytest.approx(plan.loss)
    assert 0.5 < plan.extra_compute < 2


def test_optimal_sizes_by_hand() -> None:
    """N* = (αA/βB)^(1/(α+β)) · (C/6)^(β/(α+β)): for the published fit 1.34^1.61 · (C/6)^0.45, at 6e20 FLOPs."""
    published = plan_scaling("chinchilla", compute=6e20)
    g = (0.34 * 406.4 / (0.28 * 410.7)) ** (1 / 0.62)
    assert published.params == pytest.approx(g * 1e20 ** (0.28 / 0.62))
    assert published.tokens == pytest.approx(1e20 / published.params)
    assert plan_scaling("kaplan", compute=100 * 8.64e19).params == pytest.approx(1.3e9 * 10 ** (2 * 0.73))
    assert plan_scaling("rule", compute=120e20).params == pytest.approx(1e10)
    # Given values stay fixed; the rest follows.
    run = plan_scaling("refit", params=1e9, compute=6e20)
    assert (run.params, run.tokens, run.compute) == (1e9, pytest.approx(1e11), pytest.approx(6e20))
    assert run.optimal_params == pytest.approx(plan_scaling("refit", compute=6e20).params)
    assert run.optimal_tokens == pytest.approx(plan_scaling("refit", compute=6e20).tokens)
    assert run.optimal_loss == pytest.approx(plan_scaling("refit", compute=6e20).loss)
    assert plan_scaling("rule", params=1e9).loss is None


def test_extrapolation_is_said_of_each_end_and_not_of_the_ends_themselves() -> None:
    for params, tokens, said in (
        (70e6, 5e9, 0), (16e9, 500e9, 0), (69e6, 5e9, 1), (16.1e9, 500e9, 1), (1e9, 4.9e9, 1), (1e9, 501e9, 1),
        (1e12, 1e13, 2),
    ):  # fmt: skip
        assert len(plan_scaling("refit", params=params, tokens=tokens).notes) == said, (params, tokens)
    assert plan_scaling("refit", params=1e12, tokens=1e11).notes == (
        "1e+12 parameters: extrapolated, the law's runs had 7e+07 to 1.6e+10",
    )


def test_extrapolation_is_said() -> None:
    assert not plan_scaling("refit", params=1e9).notes
    assert any("extrapolated" in note for note in plan_scaling("refit", params=1e12).notes)


@pytest.mark.parametrize(
    ("text", "value"), [("7B", 7e9), ("1.4T", 1.4e12), ("350m", 350e6), ("1e21", 1e21), ("12", 12), ("10k", 1e4)]
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert parse_count(text, place="--params") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "-7B", "0", "7X", "7BB", "nan", "inf", "1e999", "seven"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--params"):
        parse_count(text, place="--params")


def test_contradictions_are_refused() -> None:
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="params is"):
            plan_scaling(params=value)
    with pytest.raises(ConfigError, match="none of them"):
        plan_scaling("refit")
    with pytest.raises(ConfigError, match="all three"):
        plan_scaling("refit", params=1e9, tokens=1e9, compute=1e9)
    with pytest.raises(ConfigError, match="--tokens"):
        plan_scaling("refit", tokens=-1.0)
    with pytest.raises(ConfigError, match="did you mean chinchilla"):
        find_law("chinchila")
    with pytest.raises(ConfigError) as refused:
        find_law("xyzzy", place="--of")
    assert (refused.value.place, refused.value.fix[:10]) == ("--of", "use one of")


def runs_of(law: LossLaw, noise: float = 0.0) -> list[FittedRun]:
    """A grid of runs whose losses deviate by ± `noise` in a fixed pattern."""
    runs = []
    for i in range(5):
        for j in range(5):
            params, tokens = 5e7 * 3.0**i, 2e9 * 3.0**j
            runs.append(FittedRun(params, tokens, law.loss(params, tokens) * (1 + noise * math.sin(7 * i + 3 * j))))
    return runs


def test_a_fit_finds_the_law_behind_exact_runs() -> None:
    law = LAWS["refit"].law
    assert isinstance(law, LossLaw)
    fit = fit_runs(runs_of(law), resamples=20)
    assert fit.law.irreducible == pytest.approx(law.irreducible, rel=1e-4)
    assert fit.law.param_exponent == pytest.approx(law.param_exponent, rel=1e-3)
    assert fit.law.token_exponent == pytest.approx(law.token_exponent, rel=1e-3)
    assert fit.residual < 1e-6
    # Every resampled set of runs gives the same result.
    assert (fit.num_runs, fit.confidence) == (25, 0.95)
    for name, (low, high) in fit.intervals.items():
        assert low <= high
        assert (low, high) == pytest.approx((getattr(law, name),) * 2, rel=0.02), name


def test_intervals_are_those_of_the_seed_and_none_without_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_fit, "_STARTS", ((6.0, 6.0, 0.5, 0.5, 0.2),))  # one start is enough here
    law = LAWS["chinchilla"].law
    assert isinstance(law, LossLaw)
    runs = runs_of(law, noise=0.003)
    one, again, other = (fit_runs(runs, resamples=4, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one.law == other.law
    assert one.intervals != other.intervals
    assert all(low < high for low, high in one.intervals.values())
    assert 0.0005 < one.residual < 0.003, "the median of |sine| is 0.7"
    none = fit_runs(runs, resamples=0)
    assert all(math.isnan(low) and math.isnan(high) for low, high in none.intervals.values())


def test_runs_drawn_again_are_of_several_sizes_and_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_fit, "_STARTS", ((6.0, 6.0, 0.5, 0.5, 0.2),))
    law = LAWS["chinchilla"].law
    assert isinstance(law, LossLaw)
    runs = runs_of(law)  # run 5 i + j has size i and token count j
    draws = [np.arange(25) // 5, np.arange(25) % 5 * 5, np.arange(25)]  # one size, one token count, all
    asked: list[tuple[int, int, int]] = []

    class Drawing:
        def integers(self, low: int, high: int, size: int) -> np.ndarray:
            asked.append((low, high, size))
            return draws[len(asked) - 1]

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Drawing())
    fit_runs(runs, resamples=1)
    assert asked == [(0, 25, 25)] * 3


def test_the_slopes_that_the_fit_follows_are_those_of_its_distance() -> None:
    """Slopes of log L(N, D) − log loss in each constant, and of Huber's loss beyond a thousandth."""
    data = np.log(np.array([[1e8, 2e9, 3.0], [1e9, 2e10, 2.4], [7e9, 1e11, 2.2]]))
    theta = np.array([6.0, 6.4, 0.5, 0.34, 0.29])
    distance, slopes = scaling_fit._residuals(theta, data)
    for run, (params, tokens, loss) in enumerate(np.exp(data)):
        expected = math.exp(0.5) + math.exp(6.0) / params**0.34 + math.exp(6.4) / tokens**0.29
        assert distance[run] == pytest.approx(math.log(expected / loss))
    for index in range(5):
        step = np.eye(5)[index] * 1e-6
        moved = [scaling_fit._residuals(theta + sign * step, data)[0] for sign in (1, -1)]
        assert slopes[:, index] == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-4)
    # Half the square up to δ, then δ for each further unit.
    expected = sum(0.5 * d**2 if abs(d) < 1e-3 else 1e-3 * (abs(d) - 0.5e-3) for d in distance)
    assert scaling_fit._huber(theta, data) == pytest.approx(expected)


def test_six_runs_of_three_sizes_and_three_lengths_are_enough() -> None:
    enough = [FittedRun(n, d, 3.0) for n, d in ((1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (3, 3))]
    assert scaling_fit._enough(tuple(enough), "x") == tuple(enough)
    for runs, found in (
        (enough[:5], "5 runs of 3 model sizes and 3 token counts"),
        ([FittedRun(min(r.params, 2), r.tokens, 3.0) for r in enough], "2 model sizes"),
        ([FittedRun(r.params, min(r.tokens, 2), 3.0) for r in enough], "2 token counts"),
    ):
        with pytest.raises(ConfigError, match=found):
            scaling_fit._enough(tuple(runs), "x")


@pytest.mark.slow
def test_intervals_hold_the_truth_and_repeat() -> None:
    law = LAWS["chinchilla"].law
    assert isinstance(law, LossLaw)
    runs = runs_of(law, noise=0.003)
    fit = fit_runs(runs, resamples=60)
    assert fit == fit_runs(runs, resamples=60)
    for name, (low, high) in fit.intervals.items():
        assert low < getattr(fit.law, name) < high
        assert low * 0.9 < getattr(law, name) < high * 1.1
    low, high = fit.intervals["irreducible"]
    assert high - low < 0.2


def test_one_broken_run_does_not_move_the_fit() -> None:
    """Huber loss: a run with twice its expected loss (a crash) barely changes the exponents."""
    law = LAWS["refit"].law
    assert isinstance(law, LossLaw)
    runs = runs_of(law)
    runs[7] = FittedRun(runs[7].params, runs[7].tokens, 2 * runs[7].loss)
    fit = fit_runs(runs, resamples=0)
    assert fit.law.param_exponent == pytest.approx(law.param_exponent, rel=0.02)
    assert fit.law.irreducible == pytest.approx(law.irreducible, rel=0.01)


def write_runs(path: Path, header: str = "params,tokens,loss") -> Path:
    law = LAWS["refit"].law
    assert isinstance(law, LossLaw)
    lines = [header]
    for run in runs_of(law):
        second = run.tokens if "tokens" in header else 6 * run.params * run.tokens
        lines.append(f"{run.params:g},{second:g},{run.loss:.6f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_runs_are_read_with_tokens_or_flops(tmp_path: Path) -> None:
    by_tokens = read_runs(write_runs(tmp_path / "tokens.csv"))
    by_flops = read_runs(write_runs(tmp_path / "flops.csv", "Params, FLOPs, Loss"))
    assert [run.tokens for run in by_flops] == pytest.approx([run.tokens for run in by_tokens], rel=1e-4)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("params,loss\n1e8,3\n", ":1", "tokens"),
        ("params,tokens,loss\n1e8,2e9,3\n1e8,oops,3\n", ":3", "oops"),
        ("params,tokens,loss\n1e8,2e9,-3\n", ":2", "-3"),
        ("params,tokens,loss\n1e8,2e9\n", ":2", "loss"),
        ("params,tokens,loss\n1e8,2e9,3,4\n", ":2", "more cells"),
        ("params,tokens,loss\n1e8,2e9,3\n", "runs.csv", "1 runs"),
        ("", ":1", "params"),
    ],
)
def test_bad_files_are_one_line_with_file_and_line(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_runs(path)
    assert where in str(caught.value)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_drawing_has_every_run_and_a_curve_per_size() -> None:
    law = LAWS["refit"].law
    assert isinstance(law, LossLaw)
    runs = runs_of(law)
    document = minidom.parseString(draw_fit(fit_runs(runs, resamples=0), runs))
    assert len(document.getElementsByTagName("circle")) == len(runs)
    assert len(document.getElementsByTagName("polyline")) == 5


def test_the_drawing_by_hand() -> None:
    """720 × 480 with margins of 60, 130, 40 and 50; tokens from half the fewest to twice the most of the runs."""
    runs = [FittedRun(1e8, 1e9, 1.0), FittedRun(1e8, 4e9, 3.0), FittedRun(1e9, 2e9, 2.0)]
    fit = scaling_fit.Fit(LossLaw(2.0, 0.0, 1.0, 0.0, 1.0), {}, 3, 0.0)
    document = minidom.parseString(draw_fit(fit, runs))
    points = [[float(c.getAttribute(a)) for a in ("cx", "cy")] for c in document.getElementsByTagName("circle")]
    # One quarter, three quarters and half of the way from 5e8 to 8e9; losses from 0.99 to 3.03.
    down = [430 - 390 * (loss - 0.99) / 2.04 for loss in (1.0, 3.0, 2.0)]
    expected = list(zip((60 + 530 / 4, 60 + 530 * 3 / 4, 60 + 530 / 2), down, strict=True))
    assert [tuple(point) for point in points] == [pytest.approx(point, abs=0.06) for point in expected]
    lines = document.getElementsByTagName("polyline")
    assert [line.getAttribute("stroke") for line in lines] == ["hsl(0,65%,42%)", "hsl(180,65%,42%)"]
    for line in lines:
        ends = line.getAttribute("points").split()
        assert (len(ends), ends[0], ends[-1]) == (60, f"60.0,{down[2]:.1f}", f"590.0,{down[2]:.1f}")
    texts = [
        (t.firstChild.data, t.getAttribute("x"), t.getAttribute("y")) for t in document.getElementsByTagName("text")
    ]
    assert texts == [
        ("1e9", "192.5", "448"),  # the only power of ten in the range
        *((label, "52", y) for label, y in zip(
            ("0.99", "1.50", "2.01", "2.52", "3.03"), ("430.0", "332.5", "235.0", "137.5", "40.0"), strict=True)),
        ("tokens", "325.0", "468"),
        ("1e+08 params", "602", "40"), ("1e+09 params", "602", "56"),
        ("L = 2 + 0/N^1 + 0/D^1", "60", "20"),
    ]  # fmt: skip
    (path,) = document.getElementsByTagName("path")
    assert path.getAttribute("d") == "M60,40V430H590"
    wide = minidom.parseString(draw_fit(fit, runs, width=1000, height=600)).documentElement
    assert wide.getAttribute("viewBox") == "0 0 1000 600"


def test_command_prints_time_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = "scaling --params 7B --tokens 140B --law refit --gpu H100 --num_gpus 64 --price_per_gpu_hour 2 --json"
    assert main(words.split()) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["compute"] == pytest.approx(5.88e21)
    assert plan["gpu_hours"] == pytest.approx(5.88e21 / (0.4 * 989.4e12) / 3600, rel=1e-6)
    assert plan["hours"] == pytest.approx(plan["gpu_hours"] / 64)
    assert plan["price"] == pytest.approx(2 * plan["gpu_hours"])


def test_command_compares_laws_and_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", "--params", "7B", "--tables"]) == 0
    out = capsys.readouterr().out
    for text in ("chinchilla", "kaplan", "refit", "140.00B", "31.41", "122–132", "RTX 4090", "7,200"):
        assert text in out


@pytest.mark.slow
def test_command_fits_draws_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, plot = write_runs(tmp_path / "runs.csv"), tmp_path / "fit.svg"
    assert main(["scaling", "--fit", str(runs), "--plot", str(plot), "--compute", "1e21", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fit"]["law"]["irreducible"] == pytest.approx(1.8172, rel=0.02)
    assert document["plans"][0]["params"] == pytest.approx(plan_scaling("refit", compute=1e21).params, rel=0.1)
    assert minidom.parse(str(plot)).documentElement.tagName == "svg"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "nothing to compute"),
        ("--params 7B --gpu H1000", "nearest"),
        ("--params 7B --gpu 24GiB", "not known"),
        ("--params 7B --gpu H100 --num_gpus 1.5", "whole number"),
        ("--params 7B --gpu H100 --mfu 40", "more than the peak"),
        ("--plot a.svg", "nothing to draw"),
        ("--fit runs.csv --plot a.png", ".svg"),
        ("--fit absent.csv", "No such file"),
    ],
)
def test_bad_requests_are_one_line(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["scaling", *words.split()])
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_help_is_quick() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "accel_scale.cli.main", "scaling", "--help"], check=True, stdout=-3)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3
