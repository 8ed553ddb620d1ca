"""Schedules: bounds, joints, floors, agreement with transformers, resuming, refusals."""

from __future__ import annotations

import io
import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.facts.names import DECAYING_SCHEDULES, OWN_SCHEDULES, SCHEDULE_NAMES
from accel_scale.optimization.schedules import (
    create_schedule,
    decay_factor,
    lr_factor,
    scaled_learning_rate,
    scaling_advice,
    schedule_name,
    warmup_step_count,
)

SHAPES = ("1-sqrt", "linear", "cosine")


@st.composite
def runs(draw):
    """Settings of a run that is long enough for its warm-up and decay."""
    num_steps = draw(st.integers(2, 2000))
    num_warmup = draw(st.integers(0, num_steps // 2))
    return {
        "name": draw(st.sampled_from(DECAYING_SCHEDULES)),
        "num_training_steps": num_steps,
        "num_warmup_steps": num_warmup,
        "num_decay_steps": draw(st.integers(1, num_steps - num_warmup)),
        "decay_shape": draw(st.sampled_from(SHAPES)),
        "min_lr_ratio": draw(st.floats(0, 1)),
    }


HARD_RUN = {
    "name": "warmup_stable_decay", "num_training_steps": 10, "num_warmup_steps": 3, "num_decay_steps": 8,
    "decay_shape": "1-sqrt", "min_lr_ratio": 0.1,
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(runs())
@example(HARD_RUN)  # shares of 1/4 and 3/4, both rounded up
@example({**HARD_RUN, "num_training_steps": 1, "num_warmup_steps": 0, "num_decay_steps": 1})
@example({**HARD_RUN, "name": "cosine", "num_training_steps": 4, "num_warmup_steps": 3, "min_lr_ratio": 1.0})
def test_properties_of_every_decaying_schedule(run):
    num_steps, num_warmup, floor = run["num_training_steps"], run["num_warmup_steps"], run["min_lr_ratio"]
    factors = [lr_factor(step, **run) for step in range(num_steps + 2)]
    warmup, rest = factors[:num_warmup], factors[num_warmup:]
    assert all(0 < factor <= 1 for factor in warmup)  # no step is wasted with a learning rate of zero
    assert warmup == sorted(warmup)
    assert all(floor - 1e-12 <= factor <= 1 + 1e-12 for factor in rest)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rest))
    assert rest[0] == pytest.approx(1.0)  # the decay starts where the warm-up ended
    assert factors[num_steps] == pytest.approx(floor, abs=1e-12)
    assert factors[num_steps + 1] == pytest.approx(floor, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(runs())
def test_no_jump_larger_than_the_steepest_part_of_the_curve(run):
    """Continuity: consecutive factors differ by at most the largest slope of each phase."""
    num_steps, num_warmup = run["num_training_steps"], run["num_warmup_steps"]
    decay_steps = num_steps - num_warmup
    if run["name"] == "warmup_stable_decay":
        decay_steps = run["num_decay_steps"]
    shape = run["decay_shape"] if run["name"] == "warmup_stable_decay" else run["name"]
    steepest = decay_factor(0, shape) - decay_factor(1 / decay_steps, shape)
    if shape == "cosine":
        steepest = math.pi / 2 / decay_steps
    allowed = max(1 / max(1, num_warmup), steepest) + 1e-12
    factors = [lr_factor(step, **run) for step in range(num_steps + 1)]
    assert max(abs(a - b) for a, b in itertools.pairwise(factors)) <= allowed


@given(st.sampled_from(SHAPES), st.floats(0, 1), st.floats(0, 1))
def test_decay_shapes_fall_from_one_to_zero(shape, a, b):
    low, high = min(a, b), max(a, b)
    assert decay_factor(0.0, shape) == 1.0
    assert decay_factor(1.0, shape) == pytest.approx(0.0, abs=1e-15)
    assert decay_factor(high, shape) <= decay_factor(low, shape)


def test_known_values():
    # 1-sqrt a quarter into the decay: 1 - sqrt(1/4) = 1/2; with a floor of 0.2 that is 0.2 + 0.8 / 2.
    wsd = {
        "name": "warmup_stable_decay",
        "num_training_steps": 100,
        "num_warmup_steps": 10,
        "num_decay_steps": 40,
    }
    assert lr_factor(0, **wsd) == pytest.approx(0.1)
    assert lr_factor(9, **wsd) == 1.0
    assert lr_factor(59, **wsd) == 1.0
    assert lr_factor(70, **wsd) == pytest.approx(0.5)
    assert lr_factor(70, **wsd, min_lr_ratio=0.2) == pytest.approx(0.6)
    assert lr_factor(80, **wsd, decay_shape="linear") == pytest.approx(0.5)
    assert lr_factor(50, name="cosine", num_training_steps=100, min_lr_ratio=0.1) == pytest.approx(0.55)
    assert lr_factor(10**6, name="constant_with_warmup", num_training_steps=5, num_warmup_steps=3) == 1.0


def _optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def _learning_rates(optimizer, schedule, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_without_warmup_or_floor_equals_transformers(name):
    from transformers import get_scheduler

    ours, theirs = _optimizer(), _optimizer()
    schedule = create_schedule(ours, name, num_training_steps=37)
    reference = get_scheduler(name, optimizer=theirs, num_warmup_steps=0, num_training_steps=37)
    assert _learning_rates(ours, schedule, 37) == pytest.approx(_learning_rates(theirs, reference, 37))


def test_cosine_floor_equals_transformers_cosine_with_min_lr():
    from transformers import get_scheduler

    ours, theirs = _optimizer(), _optimizer()
    schedule = create_schedule(ours, "cosine", num_training_steps=50, min_lr_ratio=0.1)
    reference = get_scheduler(
        "cosine_with_min_lr",
        optimizer=theirs,
        num_warmup_steps=0,
        num_training_steps=50,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    assert _learning_rates(ours, schedule, 50) == pytest.approx(_learning_rates(theirs, reference, 50))


def test_wsd_by_ratios_needs_no_hand_computed_steps():
    optimizer = _optimizer(lr=1.0)
    schedule = create_schedule(
        optimizer, "wsd", num_training_steps=200, warmup_ratio=0.05, decay_ratio=0.2, min_lr_ratio=0.1
    )
    rates = _learning_rates(optimizer, schedule, 200)
    assert sum(rate == 1.0 for rate in rates) == 200 - 9 - 39  # both joints are at the peak
    assert rates[0] == pytest.approx(0.1)
    assert rates[160] == 1.0
    assert rates[161] < 1.0
    assert 0.1 < rates[-1] < 0.13


@pytest.mark.parametrize("name", OWN_SCHEDULES)
def test_resumes_from_plain_numbers(name):
    settings_ = {"num_training_steps": 30, "warmup_ratio": 0.0 if name == "constant" else 0.2}
    whole_optimizer = _optimizer()
    whole = _learning_rates(whole_optimizer, create_schedule(whole_optimizer, name, **settings_), 30)

    first = _optimizer()
    schedule = create_schedule(first, name, **settings_)
    rates = _learning_rates(first, schedule, 12)
    file = io.BytesIO()
    torch.save({"schedule": schedule.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)  # refuses anything other than plain data

    second = _optimizer()
    resumed = create_schedule(second, name, **settings_)
    second.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["schedule"])
    assert rates + _learning_rates(second, resumed, 18) == pytest.approx(whole)


def test_a_longer_run_resumed_follows_the_new_length():
    optimizer = _optimizer(lr=1.0)
    schedule = create_schedule(optimizer, "linear", num_training_steps=10)
    _learning_rates(optimizer, schedule, 5)
    state = schedule.state_dict()
    longer = _optimizer(lr=1.0)
    resumed = create_schedule(longer, "linear", num_training_steps=20)
    resumed.load_state_dict(state)
    longer.step()
    resumed.step()
    assert longer.param_groups[0]["lr"] == pytest.approx(1 - 6 / 20)


def test_scales_every_group_and_learning_rates_held_in_tensors():
    tensor_lr = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(2.0))
    tensor_lr.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": torch.tensor(4.0)})
    schedule = create_schedule(tensor_lr, "linear", num_training_steps=4)
    tensor_lr.step()
    schedule.step()
    assert [float(group["lr"]) for group in tensor_lr.param_groups] == [1.5, 3.0]
    assert isinstance(tensor_lr.param_groups[0]["lr"], torch.Tensor)  # torchao's optimizers require it


@pytest.mark.parametrize(
    ("steps", "settings_", "expected"),
    [
        (1875, {"warmup_ratio": 0.03}, 57),
        (100, {"warmup_steps": 7}, 7),
        (100, {"warmup_steps": 1}, 1),
        (100, {"warmup_steps": 0.07}, 7),
        (3, {"warmup_ratio": 0.03}, 1),
        (100, {}, 0),
    ],
)
def test_warmup_step_count(steps, settings_, expected):
    assert warmup_step_count(steps, **settings_) == expected


def test_other_schedules_are_transformers_own():
    optimizer = _optimizer(lr=1.0)
    schedule = create_schedule(optimizer, "polynomial", num_training_steps=10, scheduler_kwargs={"power": 2.0})
    assert _learning_rates(optimizer, schedule, 6)[5] == pytest.approx(0.25, abs=1e-5)
    floor = _optimizer(lr=1.0)
    with_floor = create_schedule(floor, "cosine_with_min_lr", num_training_steps=4, min_lr_ratio=0.3)
    assert _learning_rates(floor, with_floor, 5)[4] == pytest.approx(0.3)
    named = _optimizer(lr=1.0)
    with_floor = create_schedule(named, "cosine_warmup_with_min_lr", num_training_steps=4, min_lr_ratio=0.3)
    assert _learning_rates(named, with_floor, 4)[3] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "settings_", "place"),
    [
        ("constant", {"min_lr_ratio": 0.1}, "--min_lr_ratio"),
        ("constant", {"warmup_ratio": 0.1}, "--lr_scheduler_type"),
        ("polynomial", {"min_lr_ratio": 0.1}, "--min_lr_ratio"),
        (
            "cosine_with_min_lr",
            {"min_lr_ratio": 0.1, "scheduler_kwargs": {"min_lr_rate": 0.2}},
            "--min_lr_ratio",
        ),
        (
            "cosine_warmup_with_min_lr",
            {"min_lr_ratio": 0.1, "scheduler_kwargs": {"min_lr": 1e-5}},
            "--min_lr_ratio",
        ),
        ("cosine", {"warmup_ratio": 0.1, "warmup_steps": 5}, "--warmup_ratio"),
        ("cosine", {"warmup_ratio": 1.5}, "--warmup_ratio"),
        ("cosine", {"warmup_steps": -1}, "--warmup_steps"),
        ("cosine", {"scheduler_kwargs": {"num_cycles": 2}}, "--lr_scheduler_kwargs"),
        ("wsd", {"warmup_ratio": 0.6, "decay_ratio": 0.5}, "--decay_ratio"),
        ("wsd", {"warmup_steps": 8, "decay_ratio": 0.5}, "--decay_ratio"),
        ("wsd", {"warmup_steps": 0.8, "decay_ratio": 0.5}, "--decay_ratio"),
        ("wsd", {"warmup_steps": 30}, "--decay_ratio"),
        ("wsd", {"decay_ratio": 1.5}, "--decay_ratio"),
        ("cosine", {"min_lr_ratio": -0.1}, "--min_lr_ratio"),
        ("linear", {"warmup_ratio": -0.1}, "--warmup_ratio"),
        ("wsd", {"decay_shape": "sqrt"}, "--decay_shape"),
        ("cosin", {}, "--lr_scheduler_type"),
    ],
)
def test_refuses_what_it_cannot_honour(name, settings_, place):
    with pytest.raises(ConfigError) as error:
        create_schedule(_optimizer(), name, num_training_steps=10, **settings_)
    assert error.value.place == place
    assert error.value.fix


def test_names_and_aliases():
    from transformers import SchedulerType

    assert schedule_name("wsd") == schedule_name(SchedulerType.WARMUP_STABLE_DECAY) == "warmup_stable_decay"
    assert {member.value for member in SchedulerType} | {"wsd"} == set(SCHEDULE_NAMES)


@pytest.mark.parametrize(("rule", "expected"), [(None, 2e-4), ("linear", 8e-4), ("sqrt", 4e-4)])
def test_scaled_learning_rate(rule, expected):
    assert scaled_learning_rate(2e-4, global_batch_size=128, base_batch_size=32, rule=rule) == pytest.approx(expected)


def test_unknown_scaling_rule():
    with pytest.raises(ConfigError, match="linear or sqrt"):
        scaled_learning_rate(1.0, global_batch_size=1, base_batch_size=1, rule="cubic")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(OWN_SCHEDULES), st.integers(1, 25), st.integers(0, 25), st.sampled_from([0.0, 0.25]))
@example("warmup_stable_decay", 8, 3, 0.25)  # resumed in the middle of the decay
@example("warmup_stable_decay", 8, 8, 0.25)  # at its end
@example("cosine", 1, 0, 0.25)  # the warm-up is the whole run
def test_a_resumed_schedule_is_the_undisturbed_one(name, num_steps, at, warmup_ratio):
    at = min(at, num_steps)
    warmup = 0.0 if name == "constant" else warmup_ratio
    floor = 0.1 if name in DECAYING_SCHEDULES else None
    options = {"num_training_steps": num_steps, "warmup_ratio": warmup, "min_lr_ratio": floor}
    if name == "warmup_stable_decay":
        options["decay_ratio"] = 0.75
    optimizer = _optimizer(lr=2.0)
    schedule = create_schedule(optimizer, name, **options)
    whole = _learning_rates(optimizer, schedule, num_steps + 1)
    assert max(whole) <= 2.0
    has_decay = floor is not None and math.ceil(warmup * num_steps) < num_steps
    assert not has_decay or whole[-1] == pytest.approx(0.2)
    first, second = _optimizer(lr=2.0), _optimizer(lr=2.0)
    begun = create_schedule(first, name, **options)
    assert _learning_rates(first, begun, at) == whole[:at]
    resumed = create_schedule(second, name, **options)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(begun.state_dict())
    assert _learning_rates(second, resumed, num_steps + 1 - at) == pytest.approx(whole[at:])


def test_a_decay_begins_when_the_warm_up_is_over():
    """A quarter of ten steps rounds to three and three quarters to eight, yet the peak is reached."""
    optimizer = _optimizer(lr=1.0)
    schedule = create_schedule(optimizer, "wsd", num_training_steps=10, warmup_ratio=0.25, decay_ratio=0.75)
    rates = _learning_rates(optimizer, schedule, 11)
    assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert rates[4] == pytest.approx(1 - math.sqrt(1 / 7))
    assert rates[10] == 0
    # A trunk's warm-up may take all of the run, or more.
    trunk = _optimizer(lr=1.0)
    schedule = create_schedule(trunk, "wsd", num_training_steps=4, warmup_steps=8, decay_ratio=0)
    assert _learning_rates(trunk, schedule, 4) == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8])


def test_every_setting_reaches_a_schedule_of_transformers():
    from transformers import get_scheduler

    for name, kwargs in (("inverse_sqrt", {}), ("cosine_with_restarts", {"num_cycles": 2})):
        ours, theirs = _optimizer(), _optimizer()
        schedule = create_schedule(ours, name, num_training_steps=20, warmup_steps=5, scheduler_kwargs=kwargs)
        reference = get_scheduler(
            name, optimizer=theirs, num_warmup_steps=5, num_training_steps=20, scheduler_specific_kwargs=kwargs
        )
        assert _learning_rates(ours, schedule, 20) == pytest.approx(_learning_rates(theirs, reference, 20))


def test_a_decay_takes_a_tenth_of_the_run_by_its_root_where_nothing_is_said():
    optimizer = _optimizer(lr=1.0)
    schedule = create_schedule(optimizer, "wsd", num_training_steps=40, warmup_steps=1)
    rates = _learning_rates(optimizer, schedule, 41)
    assert rates[:37] == [1.0] * 37
    assert rates[37:] == pytest.approx([1 - math.sqrt(share / 4) for share in (1, 2, 3, 4)])
    # This is one step of ten, not all of them: there is room for half a run of decay.
    create_schedule(_optimizer(), "wsd", num_training_steps=10, warmup_steps=1, decay_ratio=0.5)


def test_a_floor_of_nothing_is_a_floor():
    optimizer = _optimizer(lr=1.0)
    schedule = create_schedule(optimizer, "constant", num_training_steps=3, min_lr_ratio=0.0)
    assert _learning_rates(optimizer, schedule, 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("warmup", "said", "rest"),
    [
        ({"warmup_ratio": 0.6}, "--warmup_ratio 0.6 and --decay_ratio 0.5", "0.4"),
        ({"warmup_steps": 8}, "--warmup_steps 8 and --decay_ratio 0.5", "0.2"),
        ({"warmup_steps": 12}, "--warmup_steps 12 and", "0"),
    ],
)
def test_a_warm_up_and_a_decay_that_do_not_fit_are_named_with_what_does(warmup, said, rest):
    with pytest.raises(ConfigError, match=said) as refused:
        create_schedule(_optimizer(), "wsd", num_training_steps=10, decay_ratio=0.5, **warmup)
    assert f"use --decay_ratio {rest} or less" in refused.value.fix
    create_schedule(_optimizer(), "wsd", num_training_steps=10, decay_ratio=0.5, warmup_ratio=0.5)


@pytest.mark.parametrize(
    ("values", "given", "said"),
    [
        ({}, (), None),
        ({"warmup_ratio": 0.0}, ("warmup_ratio",), "Fix: --warmup_ratio 0.03."),
        ({"warmup_steps": 0}, ("warmup_steps",), "Fix: --warmup_ratio 0.03."),
        ({"warmup_steps": 10}, ("warmup_steps",), None),
        ({"lr_scheduler_type": "constant"}, (), "Fix: --lr_scheduler_type constant_with_warmup --warmup_ratio 0.03."),
    ],
)
def test_a_rate_raised_with_the_batch_wants_a_warm_up(values, given, said):
    raised = {"scale_lr_from_batch_size": "linear", "lr_base_batch_size": 32, **values}

    def advice(values, batch):
        return scaling_advice(values, is_set=given.__contains__, global_batch_size=batch)

    line = advice(raised, 256)
    assert (line is None) == (said is None)
    if line is not None:
        assert "8 times as large" in line
        assert line.endswith(said)
    assert advice(raised, 32) is None  # not raised
    usual = {name: value for name, value in raised.items() if name != "lr_base_batch_size"}
    assert advice(usual, 32) is None
    assert (advice(usual, 33) is None) == (said is None), "of 32 where nothing is said"
    assert advice({**raised, "scale_lr_from_batch_size": None}, 256) is None
