"""Other people's kinds of scripts with a `ScalePlugin`, and what the plugin does in each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from other_scripts import KINDS, make_model

from accel_scale import ScalePlugin

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
    """bf16 is their default, and here is no GPU; GRPO and RLOO hand lists of rows to the training step."""
    scale = ScalePlugin(optimizer="adamw_torch_foreach", lr_schedule="wsd", checkpointing_policy="full")
    trainer = KINDS[kind](scale, model, tmp_path)
    assert trainer.args.bf16
    assert trainer.state.global_step == trainer.args.max_steps
    assert held(trainer.optimizer) == trainable(trainer.model)
    assert all(layer.gradient_checkpointing for layer in trainer.model.model.layers)
    assert trainer.lr_scheduler.lr_lambdas[0].keywords["name"] == "warmup_stable_decay"
    assert trainer.first_verification.max_abs_diff == 0.0
    assert (tmp_path / f"checkpoint-{trainer.args.max_steps}" / "model.safetensors").is_file()
