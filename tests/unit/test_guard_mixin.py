"""The guard in HF `Trainer`: the loop calls the overridden methods, and each policy does what it promises."""

from __future__ import annotations

import inspect
import json
import math

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from accel_scale import ConfigError, ScalePlugin
from accel_scale.facts.exit_statuses import GUARD_STATUS
from accel_scale.flags.guard_settings import GuardSettings
from accel_scale.trainers.guard_mixin import GuardMixin
from accel_scale.training.guard.events import read_events

pytestmark = pytest.mark.slow
# This token's embedding is broken; no other token uses it.
BROKEN, NOISE = 63, 62


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class GuardedTrainer(GuardMixin, Trainer):
    """An ordinary trainer with the guard mixin."""


class Rates(TrainerCallback):
    """Records the optimizer's learning rate in each step it takes."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.register_step_pre_hook(lambda it, *_: self.seen.append(it.param_groups[0]["lr"]))


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.get_input_embeddings().weight.data[BROKEN] = math.inf
    return made


def rows(
    *, broken: set[int] = frozenset(), noisy: set[int] = frozenset(), count: int = 32, starts: int = 60
) -> list[dict]:
    """Counting sequences; `broken` rows contain a broken token, `noisy` rows have random labels."""
    made = []
    for number in range(count):
        ids = [(number % starts + k) % 60 for k in range(12)]
        if number in broken:
            ids[6] = BROKEN
        labels = torch.randint(0, 60, (12,)).tolist() if number in noisy else list(ids)
        made.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * 12})
    return made


def trainer(folder, data: list[dict], *, guard: GuardSettings | None = None, cls: type = GuardedTrainer, **settings):
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "linear",
        "max_steps": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    made = cls(
        model=model(), args=TrainingArguments(output_dir=str(folder), **{**defaults, **settings}), train_dataset=data
    )
    made.guard_settings = guard
    return made


def losses(made: Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_the_loop_calls_what_is_overridden() -> None:
    source = inspect.getsource(Trainer._run_epoch)
    order = ["self.get_batch_samples(", "self.training_step(", "self._tr_loss += tr_loss_step", "self._get_grad_norm("]
    order += ["self.optimizer.step()", "self.accelerator.optimizer_step_was_skipped", "self.lr_scheduler.step()"]
    places = [source.index(text) for text in order]
    assert places == sorted(places)


def test_skipped_steps_leave_no_trace(tmp_path) -> None:
    with_broken = trainer(tmp_path / "a", rows(broken={5, 17}), guard=GuardSettings(), lr_scheduler_type="constant")
    with_broken.train()
    assert [(e["step"], e["rows"]) for e in read_events(tmp_path / "a")] == [(2, [4, 5, 6, 7]), (5, [16, 17, 18, 19])]
    AcceleratorState._reset_state(reset_partial_state=True)
    kept = [row for number, row in enumerate(rows()) if number // 4 not in (1, 4)]
    clean = trainer(tmp_path / "b", kept, cls=Trainer, max_steps=6, lr_scheduler_type="constant")
    clean.train()
    found = losses(with_broken)
    assert math.isnan(found[1])
    assert math.isnan(found[4])
    assert [loss for loss in found if math.isfinite(loss)] == losses(clean)
    for (name, one), (_, other) in zip(
        with_broken.model.named_parameters(), clean.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_the_schedule_waits_and_the_log_averages_what_was_taken(tmp_path) -> None:
    rates = Rates()
    made = trainer(tmp_path, rows(broken={5, 17}), guard=GuardSettings(), logging_steps=4)
    made.add_callback(rates)
    output = made.train()
    assert rates.seen == pytest.approx([5e-3 * (1 - k / 8) for k in range(6)])
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in entries] == [1, 1]
    assert all(2 < entry["loss"] < 5 for entry in entries)
    mean = sum(entry["loss"] for entry in entries) / 2  # each over three taken steps
    assert output.training_loss == made.state.log_history[-1]["train_loss"] == pytest.approx(mean, rel=1e-3)
    assert made.guard_summary() == {"policy": "skip", "events": 2}


def test_a_spike_is_taken_at_a_lower_learning_rate(tmp_path) -> None:
    guard = GuardSettings(policy="lower_lr", window=8, min_steps=4, lr_factor=0.5, lr_steps=2, threshold=4.0)
    rates = Rates()
    data = rows(noisy=set(range(60, 64)), count=80, starts=2)
    made = trainer(tmp_path, data, guard=guard, max_steps=20, lr_scheduler_type="constant")
    made.add_callback(rates)
    made.train()
    [event] = read_events(tmp_path)
    assert (event["step"], event["action"], event["lr_factor"]) == (16, "lowered", 0.5)
    assert event["loss"] > event["loss_threshold"]
    assert rates.seen == pytest.approx([5e-3] * 15 + [2.5e-3] * 2 + [5e-3] * 3)


@pytest.mark.parametrize("restore", [False, True])
def test_resuming_goes_on_with_the_guard_as_it_was(tmp_path, restore) -> None:
    data = rows(broken={1, 9, 17, 25})
    guard = GuardSettings(max_skips=2)
    first = trainer(tmp_path, data, guard=guard, max_steps=4, save_strategy="steps", save_steps=4)
    first.train()
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    state = saved["stateful_callbacks"]["GuardState"]["attributes"]["guard_state"]
    assert (state["num_judged"], state["num_events"], len(state["loss"])) == (4, 2, 2)
    AcceleratorState._reset_state(reset_partial_state=True)
    second = trainer(tmp_path, data, guard=guard, restore_callback_states_from_checkpoint=restore)
    with pytest.raises(SystemExit) as leaving:
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert leaving.value.code == GUARD_STATUS
    [*_, last] = read_events(tmp_path)
    assert (last["step"], last["action"]) == (5, "stop")
    assert "event 3 within 1000 steps" in last["reason"]


def test_stop_ends_with_one_line(tmp_path, capsys) -> None:
    made = trainer(tmp_path, rows(broken={9}), guard=GuardSettings(policy="stop"))
    with pytest.raises(SystemExit) as leaving:
        made.train()
    assert leaving.value.code == GUARD_STATUS
    assert capsys.readouterr().err.count("the guard stops the run: loss is nan") == 1
    assert made.state.global_step == 2


def test_what_a_trainer_cannot_do_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot go back to a checkpoint") as caught:
        trainer(tmp_path, rows(), guard=GuardSettings(policy="rollback")).train()
    assert "GuardedStep" in caught.value.fix
    made = trainer(tmp_path, rows(), guard=GuardSettings())
    made.args.optim = "galore_adamw_layerwise"
    with pytest.raises(ConfigError, match="in the backward pass"):
        made.train()


def test_off_and_none_leave_the_trainer_alone(tmp_path) -> None:
    for guard in (None, GuardSettings(policy="off")):
        AcceleratorState._reset_state(reset_partial_state=True)
        made = trainer(tmp_path, rows(broken={1}), guard=guard, max_steps=2)
        made.train()
        assert made.guard_summary() is None
        assert not made.model.lm_head.weight.isfinite().all()
    assert not read_events(tmp_path)


def test_plugin_guards_any_trainer_and_refuses_loops(tmp_path) -> None:
    cls = ScalePlugin(guard="skip", guard_max_skips=1).trainer(Trainer)
    made = cls(
        model=model(),
        args=TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to="none",
            disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
        ),
        train_dataset=rows(broken={5}),
    )  # fmt: skip
    assert made.guard_settings == GuardSettings(max_skips=1)
    made.train()
    assert [event["rows"] for event in read_events(tmp_path)] == [[4, 5, 6, 7]]
    with pytest.raises(ConfigError, match="GuardedStep"):
        ScalePlugin(guard="skip").accelerator(cpu=True)
    with pytest.raises(ConfigError, match="does nothing without guard"):
        ScalePlugin(guard_max_skips=1)
    with pytest.raises(ConfigError, match="is unknown"):
        ScalePlugin(guard="rollback")
