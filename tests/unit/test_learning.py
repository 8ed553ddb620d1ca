"""What counts as having learnt nothing: labels, steps and weights, each by itself and in a trainer's loop."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from torch import nn

from accel_scale.training.learning import (
    NothingLearnt,
    WeightsBefore,
    count_not_finite,
    has_labels,
    refuse_unlabelled,
    refuse_unlearnt,
)


def dataset(*labels: list[int], lengths: list[list[int]] | None = None) -> Dataset:
    columns = {"input_ids": [[1] * len(row) for row in labels], "labels": list(labels)}
    return Dataset.from_dict({**columns, **({"seq_lengths": lengths} if lengths else {})})


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (dataset([-100, -100, 7]), True),
        (dataset([-100, -100], [-100, 3]), True),
        (dataset([-100, -100], [-100]), False),
        (dataset([7, -100]), False),  # the first token of a row has no predictor
        (dataset([7], [8]), False),
        (dataset([-100, -100, 7, -100], lengths=[[2, 2]]), False),  # nor has that of a packed document
        (dataset([-100, -100, 7, 8], lengths=[[2, 2]]), True),
        (dataset([-100, 5, 7, -100], [-100, -100], lengths=[[1, 1, 2], [2]]), False),
        (Dataset.from_dict({"labels": [0, 1]}), True),  # a classifier's
        (Dataset.from_dict({"prompt": ["a"]}), True),
        (Dataset.from_dict({"prompt": []}), False),
    ],
)
def test_rows_have_labels_where_a_token_has_a_predictor_and_a_label(rows: Dataset, found: bool) -> None:
    assert has_labels(rows) is found


def test_labels_behind_many_rows_without_any_are_found() -> None:
    assert has_labels(dataset(*[[-100, -100]] * 2500, [-100, 1]))


def test_rows_without_labels_are_refused_with_the_length_that_cut_them() -> None:
    with pytest.raises(NothingLearnt, match="no training row, cut to 64 tokens") as caught:
        refuse_unlabelled(dataset([-100]), what="training", max_length=64)
    assert caught.value.place == "--max_length"
    with pytest.raises(NothingLearnt, match="completions are not empty") as caught:
        refuse_unlabelled(dataset([-100]), what="evaluation", max_length=None, flag="{}")
    assert caught.value.place == "dataset_name"


def layers() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    model[0].bias.requires_grad_(False)
    return model


def test_the_end_of_a_run_is_refused_for_each_way_of_learning_nothing() -> None:
    model = layers()
    before = WeightsBefore.of(model)
    with pytest.raises(NothingLearnt, match="without a step"):
        refuse_unlearnt(model, before=before, num_steps=0)
    with pytest.raises(NothingLearnt, match="no weight has changed in 3 steps"):
        refuse_unlearnt(model, before=before, num_steps=3)
    refuse_unlearnt(model, before=before, num_steps=3, must_change=False)
    model[0].bias.data += 1  # frozen
    with pytest.raises(NothingLearnt, match="no weight has changed"):
        refuse_unlearnt(model, before=before, num_steps=3)
    model[1].bias.data += 1
    refuse_unlearnt(model, before=before, num_steps=3, last_loss=0.5)
    for skipped in ({"num_skipped": 2}, {"num_skipped": 3, "skipped_at_end": 3}):
        steps = 3 if len(skipped) == 1 else 90
        with pytest.raises(NothingLearnt, match="the guard did not take"):
            refuse_unlearnt(model, before=before, num_steps=steps, why_skipped="loss is nan", **skipped)
    refuse_unlearnt(model, before=before, num_steps=90, num_skipped=5, skipped_at_end=1)
    for loss, words in ((math.nan, "the last loss was nan"), (0.0, "exactly 0")):
        with pytest.raises(NothingLearnt, match=words):
            refuse_unlearnt(model, before=before, num_steps=3, last_loss=loss)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_training_broke_are_named_and_those_that_came_so_are_not(value: float) -> None:
    model = layers()
    model[1].weight.data[0] = value  # as it was loaded
    before = WeightsBefore.of(model)
    assert count_not_finite(model) == {"1.weight": 64}
    model[0].weight.data += 1
    refuse_unlearnt(model, before=before, num_steps=1)
    model[0].weight.data[3, 5] = value
    with pytest.raises(NothingLearnt, match=r"not finite \(0\.weight\)"):
        refuse_unlearnt(model, before=before, num_steps=1)


def test_large_weights_are_not_taken_for_infinite_ones() -> None:
    model = layers()
    model[0].weight.data.fill_(3e38)  # their sum is
    assert count_not_finite(model) == {}
