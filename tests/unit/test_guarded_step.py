"""`GuardedStep` on one process: what a step that is not taken leaves unchanged, and what is reported where."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from accel_scale import ConfigError, Guard, GuardedStep, GuardSettings
from accel_scale.facts.exit_statuses import GUARD_STATUS
from accel_scale.modeling.precision import enable_fp16_on_cpu
from accel_scale.training.guard.controls import make_gate
from accel_scale.training.guard.optimizer_control import lowered
from accel_scale.training.guard.verdict import joined, stop_run


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """A linear model with AdamW and a schedule, and steps of two micro-batches."""

    def __init__(self, *, guard: Guard | None = None, fp16: bool = False, prepare_schedule: bool = True, **settings):
        self.accelerator = Accelerator(cpu=True, mixed_precision="fp16" if fp16 else None)
        enable_fp16_on_cpu(self.accelerator)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.schedule = self.accelerator.prepare(schedule) if prepare_schedule else schedule
        self.step = GuardedStep(self.accelerator, self.model, self.optimizer, self.schedule, guard=guard, **settings)

    def take(self, factor: float = 1.0, row_ids=((), ()), **finish):
        generator = torch.Generator().manual_seed(self.step.step_number)
        for index in range(2):
            with self.step.micro_batch(is_last=index == 1, row_ids=row_ids[index]):
                rows = torch.rand(3, 4, generator=generator)
                self.step.backward(self.model(rows).float().square().mean() * (factor if index else 1.0) / 2)
        return self.step.finish(**finish)

    def state(self) -> str:
        return str([self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()])


@pytest.mark.parametrize("prepare_schedule", [True, False])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_not_taken_changes_nothing(tmp_path, factor, prepare_schedule):
    loop = Loop(guard=Guard(), output_dir=tmp_path, prepare_schedule=prepare_schedule)
    assert loop.take().action == "stepped"
    before, rate = loop.state(), loop.schedule.get_last_lr()
    outcome = loop.take(factor)
    assert outcome.action == "skipped"
    assert loop.state() == before
    assert loop.optimizer.step_was_skipped
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    assert loop.take().taken
    assert not loop.optimizer.step_was_skipped
    assert loop.state() != before
    assert loop.schedule.get_last_lr() == [rate[0] / 2]


def test_gradients_are_those_of_an_ordinary_loop():
    guarded = Loop(max_grad_norm=0.01)
    outcomes = [guarded.take() for _ in range(3)]
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = Loop()
    for number, outcome in enumerate(outcomes, 1):
        generator, losses = torch.Generator().manual_seed(number), []
        for _ in range(2):
            losses.append(plain.model(torch.rand(3, 4, generator=generator)).square().mean() / 2)
            plain.accelerator.backward(losses[-1])
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        plain.optimizer.step()
        plain.schedule.step()
        plain.optimizer.zero_grad()
        assert outcome.loss == pytest.approx(float(sum(losses).detach()))
        assert outcome.grad_norm == pytest.approx(float(norm))
    assert guarded.state() == plain.state()


@pytest.mark.parametrize("fp16", [False, True])
def test_clip_judge_and_optimizer_step_are_finish(tmp_path, fp16):
    factors, whole = (1.0, math.nan, 1e9 if fp16 else 1.0, 1.0), Loop(guard=Guard(), output_dir=tmp_path, fp16=fp16)
    expected = [(whole.take(factor), whole.state()) for factor in factors]
    AcceleratorState._reset_state(reset_partial_state=True)
    loop = Loop(guard=Guard(), output_dir=tmp_path, fp16=fp16)
    step = loop.step

    def finish():
        outcome = step.judge(step.clip())
        if step.optimizer_step(outcome):
            loop.schedule.step()
        return outcome

    step.finish = finish
    for factor, (outcome, state) in zip(factors, expected, strict=True):
        assert str(loop.take(factor)) == str(outcome)
        assert loop.state() == state
    with pytest.raises(RuntimeError, match="is_last=True"):
        step.clip()


def test_without_clipping_and_without_guard_there_is_still_a_norm():
    loop = Loop(max_grad_norm=None)
    assert loop.take(1000.0).grad_norm > 100
    assert math.isnan(loop.take(math.nan).loss)
    assert loop.step.step_number == 3
    assert not loop.model.weight.isfinite().all()  # nothing held it back


def test_events_name_rows_and_numbers(tmp_path, capsys):
    loop = Loop(guard=Guard(), output_dir=tmp_path, first_step=41)
    loop.take(math.nan, row_ids=(["a", "b", "c"], torch.tensor([7, 8, 9])))
    loop.take(math.nan, loss_sum=3.5, row_ids=((), ()))
    first, second = [json.loads(line) for line in (tmp_path / "guard_events.jsonl").read_text().splitlines()]
    assert (first["step"], first["loss"], first["grad_norm"]) == (41, "NaN", "NaN")
    assert first["rows"] == ["a", "b", "c", 7, 8, 9]
    assert [part["rows"] for part in first["micro_batches"]] == [["a", "b", "c"], [7, 8, 9]]
    assert (second["step"], second["loss"], second["reason"]) == (42, 3.5, "gradient norm is nan")
    assert "rows whose loss is not finite: 7, 8, 9" in capsys.readouterr().out.splitlines()[0]


def test_ranks_with_parts_of_the_same_rows_name_them_once():
    parts = [
        {"rank": 0, "loss": 1.0, "rows": ["a", "b"]},
        {"rank": 0, "loss": 2.0, "rows": ["c"]},
        {"rank": 1, "loss": 0.5, "rows": ["a", "b"]},
        {"rank": 1, "loss": float("inf"), "rows": ["c"]},
        {"rank": 2, "loss": 4.0, "rows": ["d"]},
        {"rank": 3, "loss": 0.25, "rows": []},
    ]
    found = joined(parts)
    assert [(part["rank"], part["loss"], part["rows"]) for part in found] == [
        (0, 1.5, ["a", "b"]),
        (0, float("inf"), ["c"]),
        (2, 4.0, ["d"]),
        (3, 0.25, []),
    ]


def test_rows_may_be_named_at_the_end(tmp_path):
    loop = Loop(guard=Guard(), output_dir=tmp_path)
    for index in range(2):
        with loop.step.micro_batch(is_last=index == 1):
            loop.step.backward(loop.model(torch.ones(1, 4)).sum() * math.nan)
    loop.step.finish(row_ids=["x", "y"])
    event = json.loads((tmp_path / "guard_events.jsonl").read_text())
    assert event["rows"] == ["x", "y"]


def test_a_lower_learning_rate_is_seen_by_the_optimizer_alone(tmp_path):
    guard = Guard(GuardSettings(policy="lower_lr", lr_factor=0.25, lr_steps=2, window=4, min_steps=2))
    loop = Loop(guard=guard, output_dir=tmp_path)
    seen = []
    inner = loop.optimizer.optimizer
    inner.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    actions = [loop.take(factor).action for factor in (1, 1, 1e4, 1, 1)]
    assert actions == ["stepped", "stepped", "lowered", "stepped", "stepped"]
    assert seen == pytest.approx([0.1, 0.05, 0.025 / 4, 0.0125 / 4, 0.00625])
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1 / 32)


def test_learning_rates_that_are_tensors_are_changed_in_place():
    rate = torch.tensor(0.5)
    groups = [{"lr": rate}, {"lr": 0.1}]
    with lowered(groups, 0.1):
        assert groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(0.05)
        assert groups[1]["lr"] == pytest.approx(0.01)
    assert (float(rate), groups[1]["lr"]) == (0.5, 0.1)


def test_fp16_scale_is_kept_by_the_guard_and_lowered_by_the_scaler(tmp_path):
    loop = Loop(guard=Guard(GuardSettings(max_overflows=2)), output_dir=tmp_path, fp16=True)
    scaler = loop.accelerator.scaler
    assert loop.take().taken
    before, state = loop.state(), scaler.state_dict()
    assert loop.take(math.nan).action == "skipped"
    assert scaler.state_dict() == state
    assert loop.state() == before
    overflow = loop.take(1e36, loss_sum=1.0)  # the scaled gradient is infinite, but the loss is not
    assert overflow.action == "skipped"
    assert "loss scaler" in overflow.reason
    assert scaler.get_scale() == state["scale"] / 2
    assert loop.state() == before
    assert len((tmp_path / "guard_events.jsonl").read_text().splitlines()) == 1
    again = loop.take(1e36, loss_sum=1.0)
    assert "2 times in a row" in again.reason
    assert scaler.get_scale() == state["scale"] / 4
    assert len((tmp_path / "guard_events.jsonl").read_text().splitlines()) == 2
    assert loop.take().taken


def test_stop_says_why_once_and_ends_with_its_status(tmp_path, capsys):
    loop = Loop(guard=Guard(GuardSettings(policy="stop")), output_dir=tmp_path)
    outcome = loop.take(math.nan)
    assert outcome.action == "stop"
    with pytest.raises(SystemExit) as leaving:
        stop_run(loop.accelerator, outcome, program="mine.py")
    assert leaving.value.code == GUARD_STATUS == 65
    assert capsys.readouterr().err == ("mine.py: the guard stops the run: loss is nan; gradient norm is nan\n")


def test_what_cannot_be_guarded_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere to go"):
        Loop(guard=Guard())
    loop = Loop()
    with pytest.raises(ConfigError, match="was not prepared"):
        make_gate(loop.accelerator, loop.model, loop.optimizer.optimizer)
    with loop.step.micro_batch(is_last=False):
        loop.step.backward(loop.model(torch.ones(1, 4)).sum())
    with pytest.raises(RuntimeError, match="is_last=True"):
        loop.step.finish()


@pytest.mark.parametrize(
    ("has_lomo", "inner"),
    [(True, "AdamW"), (False, "DummyOptim"), (False, "LayerWiseDummyOptimizer"), (False, "AdamW")],
)
def test_optimizers_that_step_in_the_backward_pass_are_refused(has_lomo, inner, monkeypatch):
    loop = Loop()
    monkeypatch.setattr(loop.accelerator, "has_lomo_optimizer", has_lomo)
    loop.optimizer.optimizer = type(inner, (), {})()
    if inner == "AdamW" and not has_lomo:
        make_gate(loop.accelerator, loop.model, loop.optimizer)
    else:
        with pytest.raises(ConfigError, match=f"{inner} changes weights in the backward pass"):
            make_gate(loop.accelerator, loop.model, loop.optimizer)


def test_rolling_back_and_around_a_batch_ends_as_if_it_had_not_come(tmp_path):
    guard = Guard(GuardSettings(policy="rollback"))
    loop = Loop(guard=guard, output_dir=tmp_path)
    loop.accelerator.register_for_checkpointing(guard)
    batches, bad, avoided = [1, 2, 3, 4, 5, 6], 5, set()
    position, saved_at = 0, 0
    while position < len(batches):
        batch = batches[position]
        position += 1
        if batch in avoided:
            continue
        loop.step.step_number = batch  # the step number determines the batch
        outcome = loop.take(math.nan if batch == bad else 1.0)
        if outcome.action == "rollback":
            kept = guard.state_dict()
            loop.accelerator.load_state(str(tmp_path / "state"))
            restored = guard.state_dict()
            guard.load_state_dict(kept)
            guard.roll_back(restored)
            avoided.add(batch)
            position = saved_at
        elif batch == 3:
            loop.accelerator.save_state(str(tmp_path / "state"))
            saved_at = position
    assert guard.num_events == 1
    assert avoided == {bad}
    AcceleratorState._reset_state(reset_partial_state=True)
    clean = Loop()
    for batch in (1, 2, 3, 4, 6):
        clean.step.step_number = batch
        clean.take()
    assert loop.state() == clean.state()


def test_a_trainers_own_step_does_what_was_decided():
    """`optimizer.step()`, called by a trainer, steps unless the gate decided otherwise, until the gate is detached."""
    loop = Loop()
    gate = make_gate(loop.accelerator, loop.model, loop.optimizer)
    usual = loop.optimizer.step
    gate.attach()

    def moved() -> bool:
        before = loop.model.weight.detach().clone()
        loop.accelerator.backward(loop.model(torch.ones(2, 4)).square().mean())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return not torch.equal(loop.model.weight, before)

    assert moved()
    gate.holds_back = True
    assert not moved()
    assert not gate.holds_back
    assert moved()
    gate.detach()
    assert loop.optimizer.step == usual


def test_a_gate_that_was_told_nothing_does_what_the_optimizer_does():
    """This also holds after a step at another learning rate, which applies to that step alone."""
    plain, gated = Loop(), Loop()
    gate = make_gate(gated.accelerator, gated.model, gated.optimizer)
    gate.attach()

    def step(loop: Loop) -> torch.Tensor:
        before = loop.model.weight.detach().clone()
        loop.accelerator.backward(loop.model(torch.ones(2, 4)).square().mean())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loop.model.weight.detach() - before

    assert torch.equal(step(gated), step(plain))
    gate.lr_factor = 0.5
    assert torch.allclose(step(gated), 0.5 * step(plain), rtol=1e-5)
    gated.model.load_state_dict(plain.model.state_dict())
    assert torch.allclose(step(gated), step(plain), rtol=1e-5)


def test_a_step_is_finished_once():
    loop = Loop()
    with pytest.raises(RuntimeError, match="finish comes after"):
        loop.step.finish()
    loop.take()
    with pytest.raises(RuntimeError, match="finish comes after"):
        loop.step.finish()
    with loop.step.micro_batch(is_last=False):
        loop.step.backward(loop.model(torch.ones(1, 4)).mean())
    with pytest.raises(RuntimeError, match="finish comes after"):
        loop.step.finish()


def test_rows_named_at_the_end_go_with_the_losses_or_beside_rows_that_were_named(tmp_path):
    loop = Loop(guard=Guard(), output_dir=tmp_path)
    loop.take(math.nan, row_ids=((), ()), loss_sum=None)
    for first in ((), ("a",)):
        for index in range(2):
            with loop.step.micro_batch(is_last=index == 1, row_ids=first if index else ()):
                loop.step.backward(loop.model(torch.ones(1, 4)).sum() * math.nan)
        loop.step.finish(row_ids=["x", "y"])
    _, alone, beside = [
        json.loads(line)["micro_batches"] for line in (tmp_path / "guard_events.jsonl").read_text().splitlines()
    ]
    assert [(part["rows"], part["loss"]) for part in alone] == [(["x", "y"], "NaN")]
    assert [part["rows"] for part in beside] == [[], ["a"], ["x", "y"]]
    assert beside[2]["loss"] == 0


def test_steps_of_a_pipeline_are_judged_by_the_stages_that_have_a_loss(tmp_path):
    """A pipeline of two stages on four ranks: the mean over ranks counts the ranks without a loss."""
    loop = Loop(guard=Guard(GuardSettings(policy="stop")), output_dir=tmp_path)
    loop.step.loss_factor = 3
    loop.model(torch.ones(1, 4)).sum().backward()
    loop.step.record([torch.tensor(1.0), torch.tensor(2.5)], [["a"], ["b"]])
    assert loop.accelerator.sync_gradients
    outcome = loop.step.finish()
    assert outcome.loss == pytest.approx(3 * 3.5)
    shared = SimpleNamespace(layout=SimpleNamespace(pp=2), speaks_for_rows=True)
    for speaks in (True, False):
        shared.speaks_for_rows = speaks
        loop.step._shared = shared
        loop.model(torch.ones(1, 4)).sum().backward()
        loop.step.record([torch.tensor(math.nan)] if speaks else [], [["a"]])
        assert loop.step._parts[0].losses == [] or speaks
        outcome = loop.step.finish(loss_sum=math.nan)
        assert outcome.action == "stop"
    events = [json.loads(line) for line in (tmp_path / "guard_events.jsonl").read_text().splitlines()]
    assert [event["rows"] for event in events] == [["a"], []]
    loop.step._shared = SimpleNamespace(layout=SimpleNamespace(pp=2), speaks_for_rows=True)
    loop.model(torch.ones(1, 4)).sum().backward()
    loop.step.record([], [["a"]])
    assert loop.step.finish(loss_sum=0.5).loss == pytest.approx(0.5 * 3 * 2)


def test_the_watch_over_hanging_ranks_knows_the_step(monkeypatch):
    from accel_scale.training.guard import guarded_step

    asked = []
    monkeypatch.setattr(guarded_step, "follow_steps", asked.append)
    loop = Loop(first_step=7)
    loop.take()
    (step_of,) = asked
    assert step_of() == 8
    loop.step = None
    assert step_of() == 0, "it must not keep the model alive"


def test_all_ranks_have_met_before_one_leaves(monkeypatch):
    from accel_scale.training.guard import verdict

    order = []
    monkeypatch.setattr(verdict, "let_go_of_collectives", lambda: order.append("let go"))
    ranks = SimpleNamespace(
        is_main_process=False,
        wait_for_everyone=lambda: order.append("met"),
        end_training=lambda: order.append("ended"),
    )
    with pytest.raises(SystemExit):
        stop_run(ranks, verdict.StepOutcome("stop", 1.0, None, "x"))
    assert order == ["met", "let go", "ended"]


def test_gradients_are_clipped_to_one_unless_told_otherwise():
    for settings, largest in (({}, 1.0), ({"max_grad_norm": 0}, math.inf), ({"max_grad_norm": None}, math.inf)):
        AcceleratorState._reset_state(reset_partial_state=True)
        loop = Loop(**settings)
        with loop.step.micro_batch(is_last=True):
            loop.step.backward(loop.model(torch.full((1, 4), 3.0)).sum())
        assert loop.step.clip() == pytest.approx(math.sqrt(4 * 9 + 1)), "its norm before that"
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in loop.model.parameters()))
        assert norm == pytest.approx(min(largest, math.sqrt(37)), rel=1e-4)


@pytest.mark.parametrize(
    ("is_last", "every_batch", "synced"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_gradients_are_reduced_with_the_last_micro_batch_unless_with_every_one(is_last, every_batch, synced):
    loop, unsynced = Loop(), []
    gate = make_gate(loop.accelerator, loop.model, loop.optimizer)
    kwargs = {"sync_each_batch": every_batch} if every_batch else {}
    state = SimpleNamespace(plugin_kwargs=kwargs)

    class Watching:
        def __init__(self, model):
            assert model is loop.model

        def __enter__(self):
            unsynced.append(True)

        def __exit__(self, *unused):
            pass

    gate.accelerator = SimpleNamespace(sync_gradients=None, gradient_state=state, no_sync=Watching)
    with gate.micro_batch(is_last=is_last):
        pass
    assert gate.accelerator.sync_gradients is is_last
    assert (unsynced == []) is synced


@pytest.mark.parametrize("is_stateful", [True, False])
def test_what_a_hook_has_kept_of_gradients_that_are_dropped_is_undone(is_stateful, monkeypatch):
    from accel_scale.training.guard import optimizer_control

    loop, undone = Loop(), []
    hook = SimpleNamespace(is_stateful=is_stateful, undo=lambda: undone.append(True))
    monkeypatch.setattr(optimizer_control, "hook_of", lambda model: hook if model is loop.model else None)
    gate = make_gate(loop.accelerator, loop.model, loop.optimizer)
    gate.drop()
    assert undone == [True] * is_stateful
