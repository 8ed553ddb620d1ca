"""A `ScalePlugin` in a trainer: what it keeps of a script's optimizer, schedule and model, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from test_guard_trainer import Line, Rates, rows
from test_plugin import tiny, token_rows
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from accel_scale.errors import ConfigError
from accel_scale.facts.strategies import strategy_named
from accel_scale.plugin import preparing
from accel_scale.plugin.plugin import ScalePlugin
from accel_scale.training.guard.learning import NothingLearnt
from accel_scale.training.saving.verification import CheckpointMismatch

USUAL: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 0.1,
    "lr_scheduler_type": "constant", "save_strategy": "no", "use_cpu": True, "report_to": "none",
    "disable_tqdm": True, "remove_unused_columns": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Script:
    """A script's model, its optimizer with two groups and its schedule, and a trainer from the plugin."""

    def __init__(self, folder: Path, *, given: bool = True, **fields: Any) -> None:
        self.model = Line()
        groups = [
            {"params": [self.model.layer.weight], "weight_decay": 0.1, "name": "matrix"},
            {"params": [self.model.layer.bias], "weight_decay": 0.0, "lr": 0.02},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.04, betas=(0.8, 0.9))
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        pair = (self.optimizer, self.schedule) if given else (None, None)
        self.folder, self.plugin = folder, ScalePlugin(**fields)
        self.trainer: Any = self.plugin.trainer(Trainer)(
            model=self.model, args=TrainingArguments(str(folder), **USUAL), train_dataset=rows({}), optimizers=pair
        )

    def train(self) -> list[dict[str, Any]]:
        """The groups of the trained optimizer, each with its learning rate at every step."""
        seen: list[list[float]] = []
        self.trainer.create_optimizer_and_scheduler(USUAL["max_steps"])
        inner = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        inner.register_step_pre_hook(lambda it, *_: seen.append([float(group["lr"]) for group in it.param_groups]))
        self.trainer.train()
        groups = self.trainer.optimizer.optimizer.param_groups
        return [{**group, "rates": [rates[index] for rates in seen]} for index, group in enumerate(groups)]

    @property
    def used(self) -> torch.optim.Optimizer:
        return self.trainer.optimizer.optimizer  # type: ignore[no-any-return]


def test_a_plugin_that_says_nothing_of_optimizers_leaves_the_scripts_as_it_is(tmp_path: Path) -> None:
    script = Script(tmp_path)
    groups = script.train()
    assert script.used is script.optimizer
    assert getattr(script.trainer.lr_scheduler, "scheduler", script.trainer.lr_scheduler) is script.schedule
    assert [group["rates"] for group in groups] == [
        pytest.approx([0.04, 0.02, 0.04 / 3]), pytest.approx([0.02, 0.01, 0.02 / 3])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"weight_decay": 0.5}, torch.optim.AdamW, [(0.5, 0.04), (0.0, 0.02)]),
        ({"learning_rate": 0.4}, torch.optim.AdamW, [(0.1, 0.4), (0.0, 0.4)]),
        ({"optimizer": "sgd_momentum"}, torch.optim.SGD, [(0.1, 0.04), (0.0, 0.02)]),
        ({"optimizer": "sgd_momentum", "weight_decay": 0.5}, torch.optim.SGD, [(0.5, 0.04), (0.0, 0.02)]),
        # A global batch of 4 sequences for a base of 1: twice the rate.
        (
            {"scale_lr_from_batch_size": "sqrt", "lr_base_batch_size": 1},
            torch.optim.AdamW,
            [(0.1, 0.08), (0.0, 0.04)],
        ),
        (
            {"scale_lr_from_batch_size": "linear", "lr_base_batch_size": 2, "optimizer": "adamw_torch"},
            torch.optim.AdamW,
            [(0.1, 0.08), (0.0, 0.04)],
        ),
    ],
    ids=str,
)
def test_what_the_plugin_sets_is_set_and_the_scripts_schedule_goes_on(
    tmp_path: Path, fields: dict[str, Any], kind: type, expected: list[tuple[float, float]]
) -> None:
    script = Script(tmp_path, **fields)
    groups = script.train()
    assert type(script.used) is kind
    assert (script.used is script.optimizer) == ("optimizer" not in fields)
    assert groups[0]["name"] == "matrix"
    for group, (decay, rate) in zip(groups, expected, strict=True):
        assert group["weight_decay"] == decay
        assert group["rates"] == pytest.approx([rate, rate / 2, rate / 3])
    if kind is torch.optim.AdamW:
        assert groups[0]["betas"] == (0.8, 0.9)


def test_a_schedule_of_the_plugins_takes_the_scripts_place(tmp_path: Path) -> None:
    script = Script(tmp_path, lr_schedule="linear", optimizer="sgd_momentum")
    groups = script.train()
    assert [group["rates"] for group in groups] == [
        pytest.approx([0.04, 0.08 / 3, 0.04 / 3]), pytest.approx([0.02, 0.04 / 3, 0.02 / 3])
    ]  # fmt: skip
    other = Script(tmp_path / "other", lr_schedule="linear", num_training_steps=4)
    with pytest.raises(ConfigError, match="schedule of 4 steps and the 3 that will be taken differ") as refused:
        other.train()
    assert refused.value.place == "ScalePlugin(num_training_steps=)"
    assert Script(tmp_path / "third", lr_schedule="linear", num_training_steps=3).train()


def test_a_schedule_is_made_once(tmp_path: Path) -> None:
    for given in (True, False):
        trainer = Script(tmp_path / str(given), given=given, lr_schedule="linear").trainer
        trainer.create_optimizer()
        made = trainer.create_scheduler(3)
        assert trainer.create_scheduler(3) is made is not trainer._given_schedule


def test_without_an_optimizer_of_its_own_a_script_has_the_plugins(tmp_path: Path) -> None:
    script = Script(tmp_path, given=False, optimizer="sgd", learning_rate=0.3, weight_decay=0.2)
    groups = script.train()
    assert type(script.used) is torch.optim.SGD
    assert [(group["rates"], group["weight_decay"]) for group in groups] == [([0.3] * 3, 0.2), ([0.3] * 3, 0.0)]
    other = Script(tmp_path / "other", given=False, optimizer="sgd_momentum", optim_args="momentum=0.7")
    assert {group["momentum"] for group in other.train()} == {0.7}


class Own(Trainer):
    """A trainer class that creates its own optimizer, from the trainer's arguments or from its own rate."""

    rate: float | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate or self.args.learning_rate)
        return self.optimizer


@pytest.mark.parametrize(("rate", "expected"), [(None, 0.2), (0.5, 1.0)])
def test_rates_are_scaled_once_whoever_has_made_the_optimizer(
    tmp_path: Path, rate: float | None, expected: float
) -> None:
    plugin = ScalePlugin(scale_lr_from_batch_size="sqrt", lr_base_batch_size=1)
    trainer = plugin.trainer(Own)(model=Line(), args=TrainingArguments(str(tmp_path), **USUAL), train_dataset=rows({}))
    trainer.rate = rate
    trainer.add_callback(seen := Rates())
    trainer.train()
    assert seen.seen == pytest.approx([expected] * 3)


def test_an_optimizers_class_that_the_script_gives_is_replaced_and_its_settings_stay(tmp_path: Path) -> None:
    trainer = ScalePlugin(optimizer="rmsprop").trainer(Trainer)(
        model=Line(), args=TrainingArguments(str(tmp_path), **USUAL), train_dataset=rows({}),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.7, "momentum": 0.6}),
    )  # fmt: skip
    made = trainer.create_optimizer()
    assert type(made) is torch.optim.RMSprop
    assert (made.param_groups[0]["lr"], made.param_groups[0]["momentum"]) == (0.7, 0.6)
    assert trainer.create_optimizer() is made, "once"


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────

ADAPTER = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


def test_trainers_that_cannot_be_scaled_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="made without `args`"):
        ScalePlugin().trainer(Trainer)(model=Line())
    with pytest.raises(ConfigError, match="an adapter of its own") as refused:
        ScalePlugin(adapter=ADAPTER).trainer(SFTTrainer)(
            model="nowhere", args=SFTConfig(str(tmp_path), use_cpu=True, bf16=False), peft_config=ADAPTER
        )
    assert refused.value.place == "ScalePlugin(adapter=)"
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    args = TrainingArguments(str(tmp_path), **{**USUAL, "remove_unused_columns": True})
    for what, labels in (("training", ([-100], [3, 4])), ("evaluation", ([3, 4], [-100]))):
        sets = [Dataset.from_dict({"input_ids": [row], "labels": [row]}) for row in labels]
        with pytest.raises(NothingLearnt, match=f"no {what} row has a token") as empty:
            ScalePlugin().trainer(Trainer)(model=model, args=args, train_dataset=sets[0], eval_dataset=sets[1])
        assert empty.value.place == "dataset_name"
    pair = (optimizer, None)
    with pytest.raises(ConfigError, match="holds the weights that the adapter freezes"):
        ScalePlugin(adapter=ADAPTER).trainer(Trainer)(model=model, args=args, train_dataset=[], optimizers=pair)
    script = Script(tmp_path / "dummy", given=False, optimizer="sgd")
    script.trainer.optimizer = type("DummyOptim", (), {})()
    with pytest.raises(ConfigError, match="DeepSpeed's configuration has an optimizer"):
        script.trainer.create_optimizer()
    script.plugin.optimizer = None
    with pytest.raises(AttributeError):  # DeepSpeed's attribute, which does not exist here
        script.trainer.create_scheduler(3)


def test_what_fails_while_a_trainer_trains_or_saves_is_said_in_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages shared with the recipes name flags, which a script does not have."""
    args = TrainingArguments(str(tmp_path / "guarded"), **{**USUAL, "optim": "galore_adamw_layerwise"})
    guarded = ScalePlugin(guard="skip").trainer(Trainer)(model=Line(), args=args, train_dataset=rows({}))
    with pytest.raises(ConfigError) as refused:
        guarded.train()
    assert refused.value.one_line() == (
        "ScalePlugin(guard=): galore_adamw_layerwise changes weights in the backward pass, before the guard can check "
        'the step. Fix: use another optimizer, or guard="off".'
    )

    trainer = Script(tmp_path / "saved").trainer
    save = trainer._save
    part = {"layer.bias": trainer.model.layer.bias}
    monkeypatch.setattr(trainer, "_save", lambda folder, state_dict=None: save(folder, part))
    trainer.args.save_strategy = "steps"
    trainer.args.save_steps = 3
    final = Script(tmp_path / "final").trainer
    final.model.save_pretrained = lambda folder, state_dict: save_file(part, folder / "model.safetensors")
    for save_part in (trainer.train, final.save_model):
        with pytest.raises(CheckpointMismatch, match=r"layer\.weight is missing") as mismatch:
            save_part()
        assert (mismatch.value.fix or "").endswith("; verify_first_checkpoint=false saves without this check.")

    script = Script(tmp_path / "full")
    script.optimizer.register_step_pre_hook(fail_for_want_of_memory)
    with pytest.raises(SystemExit):
        script.trainer.train()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "in the optimizer's step 1" in line]
    assert ' Fix: use optimizer="adamw_torch_8bit" or paged_adamw_8bit, an adapter, or a launch file that ' in line


def fail_for_want_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_an_adapter_is_all_that_a_scripts_optimizer_trains_then(tmp_path: Path) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(
        [{"params": list(model.model.parameters()), "name": "all", "lr": 0.3}], lr=0.1, betas=(0.7, 0.8)
    )
    trainer: Any = ScalePlugin(adapter=ADAPTER, optimizer="adamw_torch").trainer(Trainer)(
        model=model, args=TrainingArguments(str(tmp_path), **{**USUAL, "remove_unused_columns": True}),
        train_dataset=token_rows(), optimizers=(optimizer, None),
    )  # fmt: skip
    made = trainer.create_optimizer()
    (group,) = made.param_groups
    trained = {id(parameter) for name, parameter in trainer.model.named_parameters() if "lora_" in name}
    assert {id(parameter) for parameter in group["params"]} == trained
    assert (group["name"], group["lr"], group["betas"]) == ("all", 0.3, (0.7, 0.8))
    assert trainer.model_wrapped is trainer.model


def test_a_model_that_is_made_for_each_run_is_prepared_each_time(tmp_path: Path) -> None:
    made: list[Any] = []

    def model_init() -> Any:
        made.append(tiny())
        return made[-1]

    trainer: Any = ScalePlugin(checkpointing_policy="full", precision="bf16_true", attention="eager").trainer(Trainer)(
        model_init=model_init, args=TrainingArguments(str(tmp_path), **{**USUAL, "remove_unused_columns": True}),
        train_dataset=token_rows(),
    )  # fmt: skip
    trainer.train()
    assert len(made) >= 2
    for model in (made[0], made[-1]):
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("name", "has_adapter", "reentrant", "mends", "remembers"),
    [
        ("zero3", True, True, False, True), ("zero3", False, False, False, True), ("zero2", True, False, False, False),
        ("fsdp2", True, False, True, False), ("single", True, False, False, False),
    ],
)  # fmt: skip
def test_a_model_is_prepared_for_the_strategy_it_trains_under(
    name: str, has_adapter: bool, reentrant: bool, mends: bool, remembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, Any] = {}
    monkeypatch.setattr(preparing, "mend_fsdp2_preparation", lambda: called.update(mended=True))
    monkeypatch.setattr(preparing, "remember_used_conversions", lambda model: called.update(remembered=True))
    monkeypatch.setattr(
        preparing, "apply_checkpointing", lambda model, policy, *, use_reentrant: called.update(how=use_reentrant)
    )
    policy = ScalePlugin(checkpointing_policy="full").policy
    adapter = ADAPTER if has_adapter else None
    model = preparing.prepare_model(
        tiny(), strategy=strategy_named(name), device_type="cpu", policy=policy, adapter=adapter
    )
    assert hasattr(model, "peft_config") == has_adapter
    assert called == {
        "how": reentrant,
        **({"mended": True} if mends else {}),
        **({"remembered": True} if remembers else {}),
    }


def test_workers_that_could_not_start_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and macOS pass a pickle to each worker."""
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none=False: "spawn")
    script = Script(tmp_path)
    script.trainer.args.dataloader_num_workers = 1
    script.trainer.data_collator = lambda batch: batch
    with pytest.raises(ConfigError, match=r"dataloader_num_workers.*the collate_fn cannot be pickled"):
        script.trainer.train()
