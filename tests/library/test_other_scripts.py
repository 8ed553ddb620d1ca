"""Scripts of the kinds other people write with a `ScalePlugin`, and what the plugin does in each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from other_scripts import KINDS, make_model
from peft import LoraConfig
from trl import DPOTrainer

from accel_scale import ConfigError, ScalePlugin

TRL = ("sft", "dpo", "kto", "reward", "grpo", "rloo")


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("library") / "model")


def trainable(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def held(optimizer: Any) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRL)
def test_trl_trainers_as_they_come(kind, model, tmp_path):
    """Their default is bf16, and there is no GPU here; GRPO and RLOO pass lists of rows to the training step."""
    scale = ScalePlugin(optimizer="adamw_torch_foreach", lr_schedule="wsd", checkpointing_policy="full")
    trainer = KINDS[kind](scale, model, tmp_path)
    assert trainer.args.bf16
    assert trainer.state.global_step == trainer.args.max_steps
    assert held(trainer.optimizer) == trainable(trainer.model)
    assert all(layer.gradient_checkpointing for layer in trainer.model.model.layers)
    assert trainer.lr_scheduler.lr_lambdas[0].keywords["name"] == "warmup_stable_decay"
    assert trainer.first_verification.max_abs_diff == 0.0
    assert (tmp_path / f"checkpoint-{trainer.args.max_steps}" / "model.safetensors").is_file()


def groups(optimizer: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(group[name] for name in names) for group in optimizer.param_groups]


@pytest.mark.slow
def test_a_head_in_a_loop_stays_a_head_and_keeps_its_warmup(model, tmp_path):
    """Only the optimizer is replaced; the trained weights, betas and schedule are the script's."""
    plain = KINDS["loop"](ScalePlugin(), model, tmp_path / "plain", cpu=True)
    run = KINDS["loop"](ScalePlugin(optimizer="adamw_bnb_8bit"), model, tmp_path / "scaled", cpu=True)
    assert type(run.optimizer.optimizer).__module__.startswith("bitsandbytes")
    assert held(run.optimizer) == held(plain.optimizer) == run.module.lm_head.weight.numel()
    assert run.rates == pytest.approx(plain.rates)
    assert run.rates[:4] == pytest.approx([0.0, 0.5e-3, 1e-3, 1e-3 * 97 / 98])
    assert groups(run.optimizer, "betas", "weight_decay") == [((0.8, 0.9), 0.01)]
    before = type(run.module).from_pretrained(model).state_dict()
    changed = [name for name, value in run.module.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["lm_head.weight"]


@pytest.mark.slow
def test_two_optimizers_each_get_their_own(model, tmp_path):
    run = KINDS["gan"](ScalePlugin(optimizer="sgd_momentum"), model, tmp_path, cpu=True)
    for module, optimizer, rate in zip(run.models, run.optimizers, (1e-3, 1e-4), strict=True):
        assert type(optimizer.optimizer) is torch.optim.SGD
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == list(
            map(id, module.parameters())
        )
        assert groups(optimizer, "lr") == [(rate,)]
    assert run.accelerator.first_verification.num_tensors == 2 + 4  # of both models


@pytest.mark.slow
@pytest.mark.parametrize("by", ["optimizers", "model_init", "override"])
def test_hf_trainer_with_its_own_model_or_optimizer(by, model, tmp_path):
    scale = ScalePlugin(optimizer="adamw_torch_foreach", checkpointing_policy="full", weight_decay=0.2)
    run = KINDS["trainer"](scale, model, tmp_path, by=by)
    assert all(layer.gradient_checkpointing for layer in run.model.model.layers)
    rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert run.optimizer.param_groups[0]["foreach"] is True
    if by == "optimizers":
        assert held(run.optimizer) == run.model.lm_head.weight.numel()
        assert groups(run.optimizer, "betas", "weight_decay") == [((0.8, 0.9), 0.2)]
        assert rates == pytest.approx([0.0, 1e-3])
    elif by == "override":
        assert held(run.optimizer) == sum(p.numel() for p in run.model.model.layers.parameters())
        assert groups(run.optimizer, "betas", "initial_lr") == [((0.8, 0.9), 1e-3), ((0.8, 0.9), 5e-4)]
    else:
        assert held(run.optimizer) == trainable(run.model)
        run.train()  # starts over, with another model
        assert all(layer.gradient_checkpointing for layer in run.model.model.layers)
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_schedule_of_given_optimizers_is_replaced_where_asked(model, tmp_path):
    scale = ScalePlugin(lr_schedule="cosine", learning_rate=1e-2)
    run = KINDS["trainer"](scale, model, tmp_path, by="optimizers")
    rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-2, 0.5e-2])
    assert groups(run.optimizer, "betas") == [((0.8, 0.9),)]
    with pytest.raises(ConfigError, match="schedule of 7 steps and the 2 that will be taken"):
        KINDS["trainer"](ScalePlugin(lr_schedule="cosine", num_training_steps=7), model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo"])
def test_an_adapter_needs_no_second_model(kind, model, tmp_path):
    """The adapter's base, without the adapter, is the reference model."""
    scale = ScalePlugin(adapter=LoraConfig(r=2, target_modules=["q_proj"]), global_batch_size=4)
    own = {"beta": 0.1} if kind == "grpo" else {}
    run = KINDS[kind](scale, model, tmp_path, **own)
    assert run.ref_model is None
    assert held(run.optimizer) == trainable(run.model) == 2 * 2 * (64 + 64)
    assert run.args.gradient_accumulation_steps == 2
    assert (tmp_path / f"checkpoint-{run.args.max_steps}" / "adapter_model.safetensors").is_file()
    with pytest.raises(ConfigError, match="gives the trainer an adapter of its own"):
        scale.trainer(DPOTrainer)(model=str(model), args=run.args, peft_config=scale.adapter)
