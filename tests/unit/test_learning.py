"""What counts as having learnt nothing: labels, steps and weights, each alone and in a trainer's loop."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch import nn

from accel_scale.trainers import learning_mixin
from accel_scale.trainers.learning_mixin import LearningMixin
from accel_scale.training.guard.learning import (
    NothingLearnt,
    WeightsBefore,
    count_not_finite,
    has_labels,
    refuse_long_prompts,
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
        (dataset([7, -100]), False),  # the first token of a row is not predicted
        (dataset([7], [8]), False),
        (dataset([-100, -100, 7, -100], lengths=[[2, 2]]), False),  # nor is the first token of a packed document
        (dataset([-100, -100, 7, 8], lengths=[[2, 2]]), True),
        (dataset([-100, 5, 7, -100], [-100, -100], lengths=[[1, 1, 2], [2]]), False),
        (Dataset.from_dict({"labels": [0, 1]}), True),  # labels of a classifier
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


def words(text: str) -> dict[str, list[int]]:
    return {"input_ids": [len(word) for word in text.split()]}


@pytest.mark.parametrize(
    ("prompts", "settings", "refused"),
    [
        (["a bb ccc", "a bb ccc dd"], {"max_length": 3}, True),
        (["a bb ccc", "a bb"], {"max_length": 3}, False),  # one row with room is enough
        (["a bb ccc"], {"max_length": 4}, False),
        (["a bb ccc"], {}, False),
        (["a bb ccc"], {"max_length": None}, False),
        (["a bb ccc"], {"max_length": 3, "packing": False}, True),
        (["a bb ccc"], {"max_length": 3, "packing_strategy": "wrapped"}, False),
        (["a bb ccc"], {"max_length": 3, "truncation_mode": "keep_end"}, False),
        (["a bb ccc"], {"max_length": 3, "completion_only_loss": False}, False),
        ([[{"role": "user", "content": "a"}]], {"max_length": 2}, False),  # the trainer reports these turns
    ],
)
def test_prompts_that_leave_no_room_are_refused_before_a_model_is_loaded(
    prompts: list, settings: dict[str, object], refused: bool
) -> None:
    rows = Dataset.from_dict({"prompt": prompts, "completion": [" x"] * len(prompts)})
    if not refused:
        return refuse_long_prompts(rows, lambda text: words(text), settings, max_length=1024)
    with pytest.raises(NothingLearnt, match=r"cut to 3 tokens.* Fix: use a larger --max_length"):
        refuse_long_prompts(rows, lambda text: words(text), settings, max_length=1024)
    return None


def test_the_end_of_a_run_is_refused_for_each_way_of_learning_nothing() -> None:
    model = layers()
    before = WeightsBefore.of(model)
    with pytest.raises(NothingLearnt, match="without a step"):
        refuse_unlearnt(model, before=before, num_steps=0)
    with pytest.raises(NothingLearnt, match="no weight has changed in 3 steps"):
        refuse_unlearnt(model, before=before, num_steps=3)
    refuse_unlearnt(model, before=before, num_steps=3, must_change=False)
    model[0].bias.data += 1  # this layer is frozen
    with pytest.raises(NothingLearnt, match="no weight has changed"):
        refuse_unlearnt(model, before=before, num_steps=3)
    model[1].bias.data += 1
    refuse_unlearnt(model, before=before, num_steps=3, last_loss=0.5)
    for skipped in ({"num_skipped": 2}, {"num_skipped": 3, "skipped_at_end": 3}):
        steps = 3 if len(skipped) == 1 else 90
        with pytest.raises(NothingLearnt, match="the guard did not take"):
            refuse_unlearnt(model, before=before, num_steps=steps, why_skipped="loss is nan", **skipped)
    refuse_unlearnt(model, before=before, num_steps=90, num_skipped=5, skipped_at_end=1)
    refuse_unlearnt(model, before=before, num_steps=4, num_skipped=2, skipped_at_end=2)
    for loss, words in ((math.nan, "the last loss was nan"), (0.0, "exactly 0")):
        with pytest.raises(NothingLearnt, match=words):
            refuse_unlearnt(model, before=before, num_steps=3, last_loss=loss)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_training_broke_are_named_and_those_that_came_so_are_not(value: float) -> None:
    model = layers()
    model[1].weight.data[0] = value  # loaded like this
    before = WeightsBefore.of(model)
    assert count_not_finite(model) == {"1.weight": 64}
    model[0].weight.data += 1
    refuse_unlearnt(model, before=before, num_steps=1)
    model[0].weight.data[3, 5] = value
    with pytest.raises(NothingLearnt, match=r"not finite \(0\.weight\)"):
        refuse_unlearnt(model, before=before, num_steps=1)


def test_large_weights_are_not_taken_for_infinite_ones() -> None:
    model = layers()
    model[0].weight.data.fill_(3e38)  # only their sum is infinite
    assert count_not_finite(model) == {}


# ── In a trainer's loop ──────────────────────────────────────────────────────────────────────────────────────────────


class Steps:
    """The parts of a trainer's run: it begins, fetches batches, and counts steps."""

    def __init__(self, batches: list, num_items: list, *, losses: tuple[float, ...] = (), moves: bool = True) -> None:
        self.model, self.moves, self.callbacks = layers(), moves, []
        self.todo = list(zip(batches, num_items, strict=True))
        self.state = SimpleNamespace(global_step=0, log_history=[{"loss": loss} for loss in losses])
        self.args = SimpleNamespace(max_length=16)

    def add_callback(self, callback) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, kind: type) -> None:
        self.callbacks = [one for one in self.callbacks if not isinstance(one, kind)]

    def get_batch_samples(self):
        return self.todo.pop(0)

    def train(self, first_step: int = 0) -> str:
        self.state.global_step = first_step
        for callback in self.callbacks:
            callback.on_train_begin(self.args, self.state, None)
        while self.todo:
            batches, _ = self.get_batch_samples()
            if batches:
                self.state.global_step += 1
                self.model[1].bias.data += self.moves
        return "done"

    def prediction_step(self, model, inputs) -> str:
        return "predicted"

    def evaluation_loop(self, loader) -> list[str]:
        return [self.prediction_step(self.model, inputs) for inputs in loader]


class Learner(LearningMixin, Steps):
    """A trainer that refuses to end successfully if nothing was learnt."""


LABELLED = [{"labels": 1}]


def test_a_trainer_that_learnt_ends_well_and_keeps_no_callback() -> None:
    trainer = Learner([LABELLED] * 3, [torch.tensor(0), torch.tensor(2), None], losses=(0.5, 0.25))
    assert trainer.train() == "done"
    assert trainer.callbacks == []
    # A finished run that is started again, and a run that was stopped before its first step.
    assert Learner([], []).train(first_step=4) == "done"


def test_a_run_that_was_stopped_within_its_first_step_is_no_run_without_rows() -> None:
    trainer = Learner([LABELLED, []], [1, None])
    trainer.begin(0)
    while trainer.todo:
        trainer.get_batch_samples()
    trainer._refuse_unlearnt()


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        (Learner([[]], [None]), "without a step"),
        (Learner([LABELLED] * 2, [0, 0]), r"no row of the first 2 steps, cut to 16 tokens, has a token"),
        (Learner([LABELLED] * 2, [1, 1], moves=False), "no weight has changed in 2 steps"),
        (Learner([LABELLED] * 2, [1, 1], losses=(1.0, math.nan)), "the last loss was nan"),
    ],
)
def test_a_trainer_that_learnt_nothing_does_not(trainer: Learner, problem: str) -> None:
    with pytest.raises(NothingLearnt, match=problem):
        trainer.train()
    assert trainer.callbacks == []


def test_what_to_change_is_said_in_the_users_words() -> None:
    trainer = Learner([LABELLED] * 2, [1, 1], moves=False)
    trainer.flag = "scale.{}"
    with pytest.raises(NothingLearnt) as refused:
        trainer.train()
    assert refused.value.place == "scale.learning_rate"


def test_rewards_may_be_nothing_and_rounded_losses_may_be_zero() -> None:
    for batches in ([[{"prompt": 1}]], [["a row of text"]]):
        assert Learner(batches * 2, [None] * 2, losses=(0.0,), moves=False).train() == "done"
    assert Learner([LABELLED] * 2, [1, 1], losses=(1.0, 0.0)).train() == "done"


def test_a_stream_without_labels_is_not_followed_to_its_end() -> None:
    trainer = Learner([LABELLED] * 20, [0] * 20)
    with pytest.raises(NothingLearnt, match="no row of the first 8 steps"):
        trainer.train()
    assert len(trainer.todo) == 20 - 9
    late = Learner([LABELLED] * 20, [0] * 7 + [1] + [0] * 12)
    assert late.train() == "done"
    resumed = Learner([LABELLED] * 9, [0] * 9)
    with pytest.raises(NothingLearnt, match="no row of the first 8 steps"):
        resumed.train(first_step=5)


def test_rows_that_were_looked_through_may_have_their_first_label_late() -> None:
    trainer = Learner([LABELLED] * 20, [0] * 19 + [1])
    trainer.train_dataset = dataset([-100, 7])
    assert trainer.train() == "done"


def test_evaluation_on_a_stream_without_labels_is_no_loss_of_zero() -> None:
    trainer, masked = Learner([], []), {"labels": torch.tensor([[7, -100, -100]])}  # the first label has no predictor
    with pytest.raises(NothingLearnt, match="no evaluation row, cut to 16 tokens"):
        trainer.evaluation_loop([masked, masked])
    assert trainer.evaluation_loop([masked, {"labels": torch.tensor([[7, -100, 7]])}]) == ["predicted"] * 2
    assert trainer.evaluation_loop([{"prompt": "a row of text"}]) == ["predicted"]
    assert trainer.evaluation_loop([{"labels": torch.tensor([1, 0])}]) == ["predicted"]


class Losses(Steps):
    """A trainer's evaluation loop: the mean over batches of losses that are 0 where nothing is labelled."""

    def prediction_step(self, model, inputs) -> tuple[torch.Tensor, None, None]:
        return (inputs["labels"] > 0).sum().float(), None, None

    def evaluation_loop(self, loader) -> SimpleNamespace:
        losses = [self.prediction_step(self.model, inputs)[0].item() for inputs in loader]
        return SimpleNamespace(metrics={"eval_loss": sum(losses) / len(losses)})


class LosingLearner(LearningMixin, Losses):
    pass


def test_an_evaluation_batch_without_labels_does_not_lower_the_mean() -> None:
    batches = [{"labels": torch.tensor([[-100, label, label]])} for label in (7, -100, 7, 7)]
    assert Losses([], []).evaluation_loop(batches).metrics["eval_loss"] == 1.5
    assert LosingLearner([], []).evaluation_loop(batches).metrics["eval_loss"] == 2.0
    assert LosingLearner([], []).evaluation_loop(batches[:1]).metrics["eval_loss"] == 2.0
    looked_through = LosingLearner([], [])
    loader = Loader(batches[1:2])
    loader.dataset = Dataset.from_dict({"labels": [[-100, -100, -100]]})
    assert looked_through.evaluation_loop(loader).metrics["eval_loss"] == 0.0, "nothing to weigh it by"


class Loader(list):
    """Batches that know their rows."""


def test_a_guard_says_how_many_steps_it_did_not_take() -> None:
    for num_skipped, at_end, problem in ((3, 0, "3 of the 4"), (3, 3, "nor any of the last 3"), (1, 2, None)):
        trainer = Learner([LABELLED] * 4, [1] * 4, losses=(math.nan,))
        trainer.guard = object()  # the guard's own log has the losses of steps that were not taken
        trainer.skipped = {"num_skipped": num_skipped, "skipped_at_end": at_end, "why_skipped": "loss is nan"}
        if problem is None:
            assert trainer.train() == "done"
        else:
            with pytest.raises(NothingLearnt, match=problem):
                trainer.train()


def test_a_few_values_of_a_large_tensor_are_remembered_and_any_of_them_tells() -> None:
    model = nn.Linear(100, 300, bias=False)
    before = WeightsBefore.of(model)
    assert before.sample["weight"].numel() == 256
    assert not before.have_changed(model)
    flat = model.weight.data.view(-1)
    flat[1] += 1  # between two sampled values: every 117th is sampled
    assert not before.have_changed(model)
    flat[117 * 255] += 1
    assert before.have_changed(model)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert WeightsBefore.of(frozen).have_changed(frozen), "nothing to compare"


def test_weights_that_came_broken_may_stay_but_not_grow() -> None:
    model = layers()
    model[1].weight.data[0, :2] = math.nan
    before = WeightsBefore.of(model)
    assert before.not_finite == {"1.weight": 2}
    assert before.newly_broken(model) is None
    model[1].weight.data[0, 2] = math.inf
    assert before.newly_broken(model) == "1.weight"


@pytest.mark.parametrize(
    ("counts", "nothing"), [([0, 0], True), ([0, 5], False), ([None, 0], True), ([None, None], False), ([3, 3], False)]
)
def test_labels_of_any_process_are_labels(counts: list[int | None], nothing: bool, monkeypatch) -> None:
    given: list[int | None] = []
    monkeypatch.setattr(learning_mixin, "gather_values", lambda mine: given.append(mine) or counts)
    assert learning_mixin._is_zero_everywhere(torch.tensor(4)) is nothing
    learning_mixin._is_zero_everywhere(None)
    assert given == [4, None]
