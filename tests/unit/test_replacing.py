"""Replacing a script's optimizer: parameters, groups, settings and schedules stay unchanged."""

from __future__ import annotations

import re

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from accel_scale.errors import ConfigError
from accel_scale.plugin.replacing import (
    forget_schedules,
    replace_optimizer,
    schedules_of,
    set_peak,
    set_weight_decay,
)

HERE = {"device_type": "cpu", "strategy": "single"}


def parameters(number: int = 3) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(number)]


def rates(optimizer: torch.optim.Optimizer, schedule, steps: int) -> list[list[float]]:
    """The learning rate of every group before each of `steps` steps."""
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


SCHEDULES = {
    "lambda": lambda o: LambdaLR(o, [lambda step: step / 10, lambda step: 1 - step / 20]),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=6),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=[1e-2, 1e-3], total_steps=8, cycle_momentum=False),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, start_factor=0.1, total_iters=3), CosineAnnealingLR(o, T_max=5)], milestones=[3]
    ),
}


def adamw_and(schedule: str):
    a, b, _ = parameters()
    optimizer = torch.optim.AdamW([{"params": [a]}, {"params": [b], "lr": 1e-4}], lr=1e-3)
    return optimizer, SCHEDULES[schedule](optimizer)


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_torch_8bit", "adamw_bnb_8bit"])
@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_a_schedule_goes_on_over_the_new_optimizer(kind, name, recwarn):
    """A schedule of any class continues, even from the middle."""
    expected = rates(*adamw_and(kind), 7)
    optimizer, schedule = adamw_and(kind)
    start = rates(optimizer, schedule, 2)
    replaced = replace_optimizer(optimizer, name, schedules=[schedule], **HERE)
    seen = start + rates(replaced, schedule, 5)
    assert not [warning for warning in recwarn if "overridden" in str(warning.message)]
    for mine, theirs in zip(seen, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_another_peak_scales_the_schedule(kind):
    optimizer, schedule = adamw_and(kind)
    set_peak(optimizer, [schedule], 1e-1)
    reference, reference_schedule = adamw_and(kind)
    expected = rates(reference, reference_schedule, 6)
    peaks = (1e-2, 1e-3) if kind == "one_cycle" else (1e-3, 1e-4)
    for mine, theirs in zip(rates(optimizer, schedule, 6), expected, strict=True):
        assert mine == pytest.approx([rate * 1e-1 / peak for rate, peak in zip(theirs, peaks, strict=True)])


def test_groups_keep_their_parameters_names_and_settings():
    a, b, left_out = parameters()
    b.requires_grad_(False)  # a script may train it later
    optimizer = torch.optim.AdamW(
        [
            {"params": [a], "name": "head", "weight_decay": 0.3},
            {"params": [b], "lr": 5e-4, "betas": (0.8, 0.9)},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-6,
    )
    new = replace_optimizer(optimizer, "adamw_bnb_8bit", **HERE)
    assert [[id(p) for p in group["params"]] for group in new.param_groups] == [[id(a)], [id(b)]]
    assert id(left_out) not in {id(p) for group in new.param_groups for p in group["params"]}
    first, second = new.param_groups
    assert (first["name"], first["lr"], first["weight_decay"]) == ("head", 1e-3, 0.3)
    assert (first["betas"], first["eps"]) == ((0.9, 0.95), 1e-6)
    assert (second["lr"], second["weight_decay"], second["betas"]) == (5e-4, 0.01, (0.8, 0.9))
    assert new.defaults["lr"] == 1e-3, "of groups that are added later"


def test_names_of_parameters_stay():
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).named_parameters(), lr=1.0)
    assert replace_optimizer(optimizer, "sgd", **HERE).param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("settings", "name", "carried", "said"),
    [
        ({"betas": (0.9, 0.95), "eps": 1e-6}, "adafactor", {}, r"adafactor has no betas=\(0.9, 0.95\), eps=1e-06"),
        ({"betas": (0.9, 0.95)}, "lion_32bit", {"betas": (0.9, 0.95)}, None),
        ({"betas": (0.8, 0.95)}, "ademamix", {"betas": (0.8, 0.95, 0.9999)}, None),
        ({"amsgrad": True}, "sgd", {}, "sgd has no amsgrad=True of the script's AdamW"),
        ({"foreach": False}, "sgd", {}, None),
        ({}, "sgd_momentum", {"momentum": 0.9}, None),
    ],
)
def test_what_cannot_be_carried_over_is_said(settings, name, carried, said):
    lines: list[str] = []
    optimizer = torch.optim.AdamW(parameters(1), lr=1e-3, **settings)
    new = replace_optimizer(optimizer, name, say=lines.append, **HERE)
    assert {key: new.param_groups[0][key] for key in carried} == carried
    assert len(lines) == (said is not None)
    assert all(re.search(str(said), line) for line in lines)


def test_momentum_and_options_of_ones_own():
    optimizer = torch.optim.SGD(parameters(1), lr=0.1, momentum=0.8, nesterov=True)
    group = replace_optimizer(optimizer, "rmsprop", **HERE).param_groups[0]
    assert group["momentum"] == 0.8
    said = replace_optimizer(optimizer, "sgd", optim_args="momentum=0.5", **HERE).param_groups[0]
    assert (said["momentum"], said["nesterov"]) == (0.5, True)


def test_what_would_train_the_other_way_is_refused():
    optimizer = torch.optim.AdamW(parameters(1), lr=1e-3, maximize=True)
    assert replace_optimizer(optimizer, "sgd", **HERE).param_groups[0]["maximize"] is True
    with pytest.raises(ConfigError, match="maximizes, and adamw_bnb_8bit cannot"):
        replace_optimizer(optimizer, "adamw_bnb_8bit", **HERE)


def test_an_adapter_joins_the_first_group_that_is_left():
    frozen, trained, new = parameters()
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": [frozen]}, {"params": [trained], "lr": 1e-4}], lr=1e-3)
    schedule = LambdaLR(optimizer, [lambda step: 1.0, lambda step: 1 / (1 + step)])
    replaced = replace_optimizer(optimizer, "sgd", schedules=[schedule], adapter_parameters=[new], **HERE)
    assert [[id(p) for p in group["params"]] for group in replaced.param_groups] == [[id(trained), id(new)]]
    assert rates(replaced, schedule, 2) == [[1e-4], [0.5e-4]]


def test_a_schedule_that_was_not_given_is_noticed():
    optimizer, schedule = adamw_and("cosine")
    assert schedules_of(optimizer, [None, schedule]) == [schedule]
    with pytest.raises(ConfigError, match="would lose hold of the learning rate"):
        schedules_of(optimizer, [torch.nn.Linear(1, 1)])


def test_a_schedule_that_moves_what_is_not_there_is_refused():
    optimizer = torch.optim.AdamW(parameters(1), lr=1e-3)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
    with pytest.raises(ConfigError, match="OneCycleLR also moves betas, which Adafactor does not have"):
        replace_optimizer(optimizer, "adafactor", schedules=[schedule], **HERE)


@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_a_replaced_schedule_leaves_the_peak(kind):
    optimizer, _ = adamw_and(kind)
    forget_schedules(optimizer)
    peaks = [1e-2, 1e-3] if kind == "one_cycle" else [1e-3, 1e-4]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(peaks)
    assert not any("initial_lr" in group for group in optimizer.param_groups)


def test_decay_for_nobody_is_refused():
    optimizer = torch.optim.SGD([{"params": parameters(1)}, {"params": parameters(1), "weight_decay": 0.1}], lr=0.1)
    set_weight_decay(optimizer, 0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.5]
    with pytest.raises(ConfigError, match="no parameter group of the script decays"):
        set_weight_decay(torch.optim.SGD(parameters(1), lr=0.1), 0.1)
