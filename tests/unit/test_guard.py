"""The guard's decisions: what it catches, what it lets pass, its false alarms, and going on after a resume."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.flags.guard import GuardArguments, TrainerGuardArguments, guard_for
from accel_scale.flags.guard_settings import GuardSettings, settings_from
from accel_scale.training.guard.estimate import RunningEstimate
from accel_scale.training.guard.events import append_event, console_line, read_events
from accel_scale.training.guard.guard import Guard

NOT_FINITE = [math.nan, math.inf, -math.inf]


def curve(num_steps: int, seed: int, *, noise: float = 0.1, start: float = 8.0, end: float = 2.5) -> list:
    """Losses and gradient norms like those of a language model.

    Losses fall fast, then have a long tail, with noise skewed upwards; norms start large and spread log-normally.
    """
    random.seed(seed)
    points = []
    for step in range(num_steps):
        level = end + (start - end) / (1 + step / 30) ** 0.8
        loss = level + noise * random.gauss(0, 1) + 0.5 * noise * random.expovariate(1)
        norm = (0.5 + 4 / (1 + step / 20)) * math.exp(random.gauss(0, 0.3))
        points.append((loss, norm))
    return points


def run(guard: Guard, points: list) -> list[str]:
    return [guard.judge(loss, norm).action for loss, norm in points]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.4])
def test_false_alarms_on_a_noisy_falling_curve_are_rare(noise: float) -> None:
    alarms = judged = 0
    for seed in range(8):
        actions = run(Guard(GuardSettings(max_skips=10**6)), curve(2500, seed, noise=noise))
        alarms += sum(action != "stepped" for action in actions)
        judged += len(actions)
    assert judged == 20_000
    assert alarms / judged <= 1e-4, alarms


def test_a_tighter_threshold_would_be_wrong_often() -> None:
    """The result above means something: the same curves do raise alarms at three standard deviations."""
    actions = run(Guard(GuardSettings(threshold=3.0, max_skips=10**6)), curve(2500, 0))
    assert sum(action != "stepped" for action in actions) > 10


@given(seed=st.integers(0, 1000), shift=st.floats(0, 1000), noise=st.floats(0, 0.3))
@settings(max_examples=30, deadline=None)
def test_a_stationary_curve_is_quiet_at_every_level(seed: int, shift: float, noise: float) -> None:
    random.seed(seed)
    points = [(2.0 + shift + noise * random.gauss(0, 1), math.exp(random.gauss(0, 0.3))) for _ in range(400)]
    assert set(run(Guard(GuardSettings(max_skips=10**6)), points)) == {"stepped"}


@given(values=st.lists(st.floats(-100, 100), min_size=8, max_size=40), shift=st.floats(0, 1e4))
@settings(max_examples=100, deadline=None)
def test_thresholds_move_with_the_curve(values: list[float], shift: float) -> None:
    low, high = (RunningEstimate(64, 8, least_ratio=1.0) for _ in range(2))
    for value in values:
        low.add(value)
        high.add(value + shift)
    assert high.threshold(8) == pytest.approx(low.threshold(8) + shift, rel=1e-6, abs=1e-6)


@given(
    before=st.integers(0, 60),
    bad=st.sampled_from(NOT_FINITE),
    in_loss=st.booleans(),
    policy=st.sampled_from(["skip", "lower_lr", "rollback", "stop"]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_not_finite_is_always_caught(before: int, bad: float, in_loss: bool, policy: str) -> None:
    guard = Guard(GuardSettings(policy=policy))
    run(guard, curve(before, 1))
    decision = guard.judge(bad if in_loss else 2.0, 1.0 if in_loss else bad)
    expected = {"skip": "skipped", "lower_lr": "skipped", "rollback": "rollback", "stop": "stop"}
    assert decision.action == expected[policy]
    assert decision.is_event
    assert not decision.taken
    assert str(bad) in decision.reason


def test_spikes_are_caught_upwards_only_and_change_nothing() -> None:
    guard = Guard()
    points = curve(300, 2)
    run(guard, points)
    before = guard.state_dict()
    for loss, norm, reason in ((9.0, 0.6, "loss 9"), (2.6, 60.0, "gradient norm 60"), (9.0, 60.0, "; gradient norm")):
        decision = guard.judge(loss, norm)
        assert decision.action == "skipped"
        assert reason in decision.reason
    assert guard.state_dict()["loss"] == before["loss"]
    assert guard.state_dict()["grad_norm"] == before["grad_norm"]
    assert guard.judge(0.01, 0.001).action == "stepped"


def test_nothing_is_judged_a_spike_before_there_is_a_level() -> None:
    guard = Guard(GuardSettings(min_steps=32))
    assert run(guard, [(2.0, 1.0)] * 31 + [(500.0, 900.0)]) == ["stepped"] * 32
    assert guard.judge(500.0, 1.0).action == "skipped"


def test_a_constant_curve_needs_more_than_a_rounding_error() -> None:
    guard = Guard()
    run(guard, [(2.0, 1.0)] * 100)
    assert guard.judge(2.09, 1.9).action == "stepped"
    assert guard.judge(2.11, 1.0).action == "skipped"
    assert guard.judge(2.0, 2.1).action == "skipped"


def test_the_loss_decides_alone_where_there_is_no_norm() -> None:
    guard = Guard()
    for _ in range(64):
        assert guard.judge(2.0, None).action == "stepped"
    assert guard.judge(4.0, None).action == "skipped"


def test_lower_learning_rate_lasts_as_long_as_asked_and_starts_over() -> None:
    guard = Guard(GuardSettings(policy="lower_lr", lr_steps=3, lr_factor=0.5))
    run(guard, [(2.0, 1.0)] * 64)
    factors = [guard.judge(loss, 1.0).lr_factor for loss in (9.0, 2.0, 9.0, 2.0, 2.0, 2.0)]
    assert factors == [0.5, 0.5, 0.5, 0.5, 0.5, 1.0]
    skipped = guard.judge(math.nan, 1.0)
    assert (skipped.action, skipped.lr_factor) == ("skipped", 1.0)


def test_the_budget_stops_a_run_that_only_skips() -> None:
    guard = Guard(GuardSettings(max_skips=2, skip_window=10))
    bad = (math.nan, 1.0)
    assert (
        run(guard, [bad, bad] + [(2.0, 1.0)] * 8 + [bad, bad]) == ["skipped"] * 2 + ["stepped"] * 8 + ["skipped"] * 2
    )
    decision = guard.judge(*bad)
    assert decision.action == "stop"
    assert "event 3 within 10 steps, more than the 2 that are tolerated" in decision.reason
    assert Guard(GuardSettings(max_skips=0)).judge(math.nan, 1.0).action == "stop"


def test_norms_that_stay_high_whatever_the_batch_are_not_the_rows() -> None:
    """The weights are on a steep spot: the loss is as before, and skipping batches does not lead away from it."""
    guard = Guard(GuardSettings(max_skips=4))
    run(guard, curve(300, 3))
    decisions = [guard.judge(2.6, norm) for norm in (18.0, 20.0, 22.0, 21.0, 19.0, 15.0)]
    assert [decision.action for decision in decisions] == ["skipped"] * 3 + ["stepped"] * 3
    assert [decision.is_event for decision in decisions] == [True] * 4 + [False] * 2
    assert "not the rows" in decisions[3].reason
    assert guard.state_dict()["grad_norm"][-3:] == [21.0, 19.0, 15.0]
    # Norms fall, and later another such spot comes: neither has used up the budget.
    for _ in range(3):
        assert run(guard, [(2.6, 0.6)] * 30) == ["stepped"] * 30
        assert run(guard, [(2.6, 20.0)] * 4) == ["skipped"] * 3 + ["stepped"]
    assert guard.num_events == 12
    # Isolated batches are still skipped, and so is every batch whose loss spikes as well.
    assert run(guard, [(2.6, 0.6), (2.6, 20.0), (2.6, 0.6)]) == ["stepped", "skipped", "stepped"]
    assert run(guard, [(9.0, 20.0)] * 4) == ["skipped"] * 3 + ["stop"]


def test_rollbacks_that_come_to_the_same_weights_again_and_again_end_too() -> None:
    guard = Guard(GuardSettings(policy="rollback", max_skips=4))
    run(guard, curve(300, 3))
    checkpoint = json.loads(json.dumps(guard.state_dict()))

    def steps_again(num_good: int, norm: float) -> str:
        """From the checkpoint: good steps as before, then one batch with `norm`."""
        guard.roll_back(checkpoint)
        assert run(guard, [(2.6, 0.6)] * num_good) == ["stepped"] * num_good
        return guard.judge(2.6, norm).action

    assert [steps_again(22, 20.0) for _ in range(4)] == ["rollback"] * 3 + ["stepped"]
    assert run(guard, [(2.6, 20.0), (2.6, 15.0), (2.6, 0.6)]) == ["stepped"] * 3
    # Other weights each time: bad rows in several places, as many of which are tolerated as the budget allows.
    assert [steps_again(num_good, 20.0) for num_good in (3, 5, 7, 9, 11)] == ["rollback"] * 4 + ["stop"]


@pytest.mark.parametrize(("policy", "expected"), [("lower_lr", "lowered"), ("stop", "stop")])
def test_other_policies_do_as_they_say_with_norms_that_stay_high(policy: str, expected: str) -> None:
    guard = Guard(GuardSettings(policy=policy))
    run(guard, curve(300, 3))
    assert run(guard, [(2.6, 20.0)] * 5) == [expected] * 5


def test_fp16_overflows_are_the_scalers_until_there_are_too_many() -> None:
    guard = Guard(GuardSettings(max_overflows=3))
    first = [guard.judge(2.0, math.inf, has_loss_scaler=True) for _ in range(2)]
    assert all((d.action, d.is_event, d.is_overflow) == ("skipped", False, True) for d in first)
    assert guard.judge(2.0, 1.0, has_loss_scaler=True).action == "stepped"
    decisions = [guard.judge(2.0, math.nan, has_loss_scaler=True) for _ in range(3)]
    assert [d.is_event for d in decisions] == [False, False, True]
    assert decisions[-1].is_overflow  # the scaler keeps lowering its scale
    assert "3 times in a row" in decisions[-1].reason
    loss = guard.judge(math.nan, math.nan, has_loss_scaler=True)
    assert loss.is_event
    assert not loss.is_overflow
    assert guard.judge(2.0, math.inf).is_event  # nothing else would catch it


@pytest.mark.slow
@given(cut=st.integers(0, 300), seed=st.integers(0, 50), policy=st.sampled_from(["skip", "lower_lr", "rollback"]))
@settings(max_examples=25, deadline=None)
def test_a_resumed_guard_decides_as_one_that_went_on(cut: int, seed: int, policy: str) -> None:
    points = curve(300, seed)
    for index in range(20, 300, 37):
        points[index] = (math.nan, math.inf) if index % 2 else (50.0, 90.0)
    for index in range(200, 206):
        points[index] = (points[index][0], 90.0)
    chosen = GuardSettings(policy=policy, max_skips=5, skip_window=150, lr_steps=20)
    going_on, first = Guard(chosen), Guard(chosen)
    expected = [going_on.judge(*point) for point in points]
    for point in points[:cut]:
        first.judge(*point)
    resumed = Guard(chosen)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [resumed.judge(*point) for point in points[cut:]] == expected[cut:]
    assert resumed.state_dict() == going_on.state_dict()


def test_a_rollback_restores_the_level_but_not_the_budget() -> None:
    guard = Guard(GuardSettings(policy="rollback", max_skips=1))
    run(guard, [(2.0, 1.0)] * 40)
    saved = guard.state_dict()
    run(guard, [(3.0, 1.0)] * 0 + [(1.5, 1.0)] * 30)
    assert guard.judge(math.nan, 1.0).action == "rollback"
    guard.roll_back(saved)
    assert guard.state_dict()["loss"] == saved["loss"]
    assert guard.judge(math.nan, 1.0).action == "stop"


def test_off_judges_nothing() -> None:
    decision = Guard(GuardSettings(policy="off")).judge(math.nan, math.nan)
    assert (decision.action, decision.taken, decision.lr_factor, decision.is_overflow) == ("stepped", True, 1.0, False)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"policy": "ignore"}, "--guard"),
        ({"window": 2}, "--guard_window"),
        ({"window": 16}, "--guard_min_steps"),
        ({"threshold": 0.0}, "--guard_threshold"),
        ({"threshold": math.nan}, "--guard_threshold"),
        ({"max_skips": -1}, "--guard_max_skips"),
        ({"lr_factor": 1.0}, "--guard_lr_factor"),
        ({"lr_steps": 0}, "--guard_lr_steps"),
        ({"max_overflows": 0}, "GuardSettings(max_overflows=)"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(wrong: dict, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GuardSettings(**wrong)
    assert caught.value.place == place


def test_flags_that_would_do_nothing_are_refused() -> None:
    assert settings_from(GuardArguments(guard_window=64)) == GuardSettings(window=64)
    assert TrainerGuardArguments().settings().policy == "skip"
    with pytest.raises(ConfigError, match="does nothing with --guard off"):
        settings_from(TrainerGuardArguments(guard="off", guard_window=64))
    with pytest.raises(ConfigError, match="does nothing with --guard skip"):
        settings_from(GuardArguments(guard_lr_factor=0.5))
    assert guard_for(TrainerGuardArguments(), "adamw_torch", None) == (GuardSettings(), None)
    assert settings_from(GuardArguments(guard="lower_lr", guard_lr_factor=0.5)).lr_factor == 0.5


def test_an_optimizer_whose_steps_cannot_be_judged_has_no_guard_unless_one_is_asked_for() -> None:
    settings, note = guard_for(TrainerGuardArguments(), "adalomo", None)
    assert settings.policy == "off"
    assert "adalomo" in str(note)
    with pytest.raises(ConfigError, match="in the backward pass") as caught:
        guard_for(TrainerGuardArguments(), "galore_adamw_layerwise", "run.yaml:3")
    assert caught.value.place == "run.yaml:3"
    with pytest.raises(ConfigError, match="does nothing with --guard off"):
        guard_for(TrainerGuardArguments(guard_window=64), "lomo", None)


def test_events_are_strict_json_and_come_back(tmp_path) -> None:
    event = {
        "step": 7,
        "action": "skipped",
        "reason": "loss is nan",
        "loss": math.nan,
        "grad_norm": math.inf,
        "rows": list(range(40)),
        "micro_batches": [
            {"rank": 0, "loss": 1.0, "rows": list(range(20))},
            {"rank": 1, "loss": math.nan, "rows": []},
        ],
    }
    path = append_event(tmp_path / "run", event)
    append_event(tmp_path / "run", event)
    text = path.read_text()
    assert text.count("\n") == 2
    assert '"loss": "NaN", "grad_norm": "Infinity"' in text
    first, _ = read_events(tmp_path / "run")
    assert math.isnan(first["loss"])
    assert first["grad_norm"] == math.inf
    assert math.isnan(first["micro_batches"][1]["loss"])
    assert console_line(event).endswith("rows in its batch: 0, 1, 2, 3, 4, 5, 6, 7 and 32 more")
    event["micro_batches"][1]["rows"] = [31]
    assert console_line(event) == ("warning: step 7 was not taken: loss is nan; rows whose loss is not finite: 31")


def test_a_guard_goes_on_from_its_state_as_if_undisturbed():
    """Estimates, events and counts: the same decisions on the same numbers until the budget is used up."""
    settings = GuardSettings(policy="skip", min_steps=5, max_skips=3)
    whole = Guard(settings)
    for step in range(12):
        whole.judge(2.0 + 0.01 * (step % 3), 1.0 + 0.02 * (step % 4))
    whole.judge(math.nan, 1.0)
    resumed = Guard(settings)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.state_dict() == whole.state_dict()
    for loss, norm in ((2.01, 1.0), (50.0, 1.0), (2.0, 90.0), (2.0, 1.02), (math.inf, 1.0), (60.0, 1.0)):
        assert resumed.judge(loss, norm) == whole.judge(loss, norm)
    assert resumed.state_dict() == whole.state_dict()
    assert whole.judge(math.nan, 1.0).action == "stop"


def test_a_state_of_an_earlier_version_is_gone_on_from() -> None:
    """Such a state lacks the count of norm spikes at the same weights, so the next three batches are skipped."""
    settings = GuardSettings(max_skips=9)
    old = Guard(settings)
    run(old, curve(300, 3))
    run(old, [(2.6, 20.0)] * 2)
    state = {name: value for name, value in old.state_dict().items() if "spikes" not in name and name != "num_taken"}
    resumed = Guard(settings)
    resumed.load_state_dict(state)
    assert (resumed.num_judged, resumed.num_events) == (302, 2)
    assert run(resumed, [(2.6, 20.0)] * 4) == ["skipped"] * 3 + ["stepped"]
    assert resumed.state_dict()["num_taken"] == 1


def test_what_an_event_was_judged_by_is_said() -> None:
    guard = Guard(GuardSettings(policy="lower_lr", lr_steps=2, lr_factor=0.25))
    run(guard, [(2.0, 1.0)] * 40)
    usual = guard.judge(2.0, 1.0)
    assert (usual.loss_threshold, usual.grad_norm_threshold) == (pytest.approx(2.1), pytest.approx(2.0))
    assert (usual.is_event, usual.reason, usual.lr_factor, usual.is_overflow) == (False, None, 1.0, False)
    spike = guard.judge(2.2, 1.0)
    assert (spike.action, spike.taken, spike.lr_factor, spike.is_event) == ("lowered", True, 0.25, True)
    assert spike.loss_threshold == pytest.approx(2.1)
    assert guard.state_dict()["lowered_steps_left"] == 1
    assert guard.state_dict()["num_taken"] == 42
    assert guard.judge(2.0, 1.0).lr_factor == 0.25
    assert guard.judge(2.0, 1.0).lr_factor == 1.0
    few = Guard(GuardSettings(min_steps=4))
    run(few, [(2.0, 1.0)] * 3)
    assert few.judge(9.0, 9.0).loss_threshold is None
    assert few.judge(2.0, 1.0).loss_threshold is not None


def test_estimates_by_hand() -> None:
    """Median 3, median absolute deviation 1: eight robust deviations above are 3 + 8 · 1.4826."""
    estimate = RunningEstimate(5, 5, least_ratio=1.05)
    for value in (100.0, 1.0, 2.0, 3.0, 4.0, math.nan):
        estimate.add(value)
    assert estimate.threshold(8) == pytest.approx(3 + 8 * 1.4826)  # of the values 100, 1, 2, 3, 4
    estimate.add(5.0)
    assert list(estimate.values) == [1, 2, 3, 4, 5], "the last five"
    assert estimate.threshold(2) == pytest.approx(3 + 2 * 1.4826)
    ratios = RunningEstimate(5, 3, least_ratio=2.0, is_logarithmic=True)
    for norm in (1.0, 0.0, -1.0, math.inf):
        ratios.add(norm)
    assert list(ratios.values) == [1.0]
    assert ratios.threshold(8) is None
    ratios.add(math.e)
    ratios.add(math.e**2)
    assert ratios.threshold(1) == pytest.approx(math.exp(1 + 1.4826))
    assert ratios.threshold(0.1) == pytest.approx(2 * math.e)
    assert ratios.threshold(10**6) == math.exp(700)
    below = RunningEstimate(4, 2, least_ratio=1.5)
    for value in (-2.0, -2.0):
        below.add(value)
    assert below.threshold(8) == -1.0


def test_a_loss_around_zero_is_no_cost_that_spikes() -> None:
    """A policy gradient's loss is mostly 0: without `loss_spikes` only non-finite losses and bad norms are events."""
    losses = [0.0 if step % 3 else 0.01 * (step % 7) for step in range(200)]
    guard = Guard(GuardSettings(loss_spikes=False))
    assert {guard.judge(loss, 1.0).action for loss in losses} == {"stepped"}
    assert guard.judge(math.nan, 1.0).action == "skipped"
    assert guard.judge(0.0, 1e6).action == "skipped"
    judged = Guard(GuardSettings())
    assert "skipped" in {judged.judge(loss, 1.0).action for loss in [1e-8 * loss for loss in losses] + [0.5]}
