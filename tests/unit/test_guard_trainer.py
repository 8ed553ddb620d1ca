"""The guard in HF `Trainer` on a one-layer model, in tenths of a second; test_guard_mixin.py has the slow cases."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback, TrainingArguments

from accel_scale.facts.exit_statuses import GUARD_STATUS
from accel_scale.flags.guard_settings import GuardSettings
from accel_scale.trainers.guard_mixin import GuardMixin
from accel_scale.training.guard.events import read_events

RATE = 0.01


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Line(torch.nn.Module):
    """One layer that learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}


class Guarded(GuardMixin, Trainer):
    """An ordinary trainer with the guard mixin."""


class Rates(TrainerCallback):
    """Records the learning rate of each step the optimizer takes."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.register_step_pre_hook(lambda it, *_: self.seen.append(it.param_groups[0]["lr"]))


def rows(changes: dict[int, float], count: int = 32) -> list[dict[str, Any]]:
    """Rows whose labels are multiplied by the factor that `changes` gives for the row's index, if any."""
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(count, 4, generator=draw)
    return [{"x": row.tolist(), "labels": row.sum().item() * changes.get(n, 1.0)} for n, row in enumerate(x)]


def trainer(folder: Path, data: list[dict[str, Any]], guard: GuardSettings | None, **settings: Any) -> Any:
    usual = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 8, "learning_rate": RATE,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**usual, **settings})
    made = (Guarded if guard else Trainer)(model=Line(), args=arguments, train_dataset=data)
    if guard:
        made.guard_settings = guard
    made.rates = Rates()
    made.add_callback(made.rates)
    return made


def losses(made: Any) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_a_run_with_bad_rows_is_the_one_without_their_batches(tmp_path: Path) -> None:
    made = trainer(tmp_path / "a", rows({6: math.nan, 28: math.inf}), GuardSettings())
    output = made.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    kept = [row for number, row in enumerate(rows({})) if number // 4 not in (1, 7)]
    clean = trainer(tmp_path / "b", kept, None, max_steps=6)
    assert clean.train().training_loss == pytest.approx(output.training_loss)
    assert made.state.log_history[-1]["train_loss"] == pytest.approx(output.training_loss), "of the taken steps"
    found = losses(made)
    assert [number for number, loss in enumerate(found) if not math.isfinite(loss)] == [1, 7]
    assert [loss for loss in found if math.isfinite(loss)] == losses(clean)
    assert torch.equal(made.model.layer.weight, clean.model.layer.weight)
    assert made.rates.seen == [RATE] * 6
    assert [(event["step"], event["rows"]) for event in read_events(tmp_path / "a")] == [
        (2, [4, 5, 6, 7]),
        (8, [28, 29, 30, 31]),
    ]
    assert made.skipped["num_skipped"] == 2
    assert made.skipped["skipped_at_end"] == 1
    assert "loss is inf" in made.skipped["why_skipped"]
    assert made.guard_summary() == {"policy": "skip", "events": 2}
    assert made._gate is None


def test_the_log_is_the_mean_of_what_was_taken_and_the_schedule_waits(tmp_path: Path) -> None:
    settings = {"logging_steps": 4, "lr_scheduler_type": "linear"}
    made = trainer(tmp_path / "a", rows({6: math.nan, 13: math.nan}), GuardSettings(), **settings)
    made.train()
    assert made.rates.seen == pytest.approx([RATE * (1 - step / 8) for step in range(6)])
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry.get("skipped_steps") for entry in entries] == [2, None]
    AcceleratorState._reset_state(reset_partial_state=True)
    kept = [row for number, row in enumerate(rows({})) if number // 4 not in (1, 3)]
    each = trainer(tmp_path / "b", kept, None, max_steps=6, lr_scheduler_type="linear")
    schedule = torch.optim.lr_scheduler.LambdaLR
    each.create_optimizer()
    each.lr_scheduler = schedule(each.optimizer, lambda step: 1 - step / 8)
    each.train()
    first, second = losses(each)[:2], losses(each)[2:]
    assert [entry["loss"] for entry in entries] == pytest.approx([sum(first) / 2, sum(second) / 4], abs=2e-4)


def test_where_no_step_was_taken_the_log_says_what_they_had(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows({0: math.nan, 5: math.nan}), GuardSettings(), logging_steps=2, max_steps=4)
    made.train()
    first, second = [entry for entry in made.state.log_history if "loss" in entry]
    assert math.isnan(first["loss"])
    assert (first["skipped_steps"], "skipped_steps" in second) == (2, False)
    assert made.skipped == {"num_skipped": 2, "skipped_at_end": 0, "why_skipped": ""}


def test_a_spike_lowers_the_rate_for_as_many_steps_as_asked(tmp_path: Path) -> None:
    guard = GuardSettings(policy="lower_lr", window=8, min_steps=2, lr_factor=0.5, lr_steps=2)
    made = trainer(tmp_path, rows({14: 1000.0}), guard)
    made.train()
    assert made.rates.seen == pytest.approx([RATE] * 3 + [RATE / 2] * 2 + [RATE] * 3)
    (event,) = read_events(tmp_path)
    assert (event["step"], event["action"], event["lr_factor"]) == (4, "lowered", 0.5)
    assert event["grad_norm"] > event["grad_norm_threshold"] > 0
    assert made.skipped["num_skipped"] == 0


def test_a_run_that_goes_on_has_the_guard_as_it_was(tmp_path: Path) -> None:
    data = rows({6: math.nan, 28: math.nan})
    first = trainer(tmp_path, data, GuardSettings(max_skips=1), max_steps=4, save_strategy="steps", save_steps=4)
    first.train()
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    state = saved["GuardState"]["attributes"]["guard_state"]
    assert (state["num_judged"], state["num_events"], len(state["loss"])) == (4, 1, 3)
    AcceleratorState._reset_state(reset_partial_state=True)
    second = trainer(tmp_path, data, GuardSettings(max_skips=1))
    with pytest.raises(SystemExit) as ended:
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert ended.value.code == GUARD_STATUS
    last = read_events(tmp_path)[-1]
    assert (last["step"], last["action"]) == (8, "stop")


def test_without_a_guard_nothing_is_held_back(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows({0: math.nan}), GuardSettings(policy="off"), max_steps=1)
    made.train()
    assert not made.model.layer.weight.isfinite().any()
    assert made.guard_summary() is None
    assert not read_events(tmp_path)
