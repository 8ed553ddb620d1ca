"""The recipe's configuration is TRL's with a few different defaults, and works on a CPU in bf16."""

from __future__ import annotations

import inspect

import pytest
import transformers
from transformers import TrainingArguments

from accel_scale.settings.trl_config import RecipeModelConfig, RecipeSFTConfig


def test_defaults_that_differ_from_trl(tmp_path) -> None:
    config = RecipeSFTConfig(output_dir=str(tmp_path))
    assert config.packing is True
    assert config.logging_nan_inf_filter is False
    assert config.gradient_checkpointing is False
    assert RecipeModelConfig().use_bnb_nested_quant is True
    assert RecipeModelConfig().dtype is None


@pytest.mark.parametrize(
    ("optim", "schedule"), [("adamw_torch_foreach", "wsd"), ("adamw_bnb_8bit", "cosine"), ("sgd_momentum", "linear")]
)
def test_names_of_ours_survive_transformers_enums(tmp_path, optim: str, schedule: str) -> None:
    config = RecipeSFTConfig(output_dir=str(tmp_path), optim=optim, lr_scheduler_type=schedule)
    assert (config.optimizer_name, config.schedule_name) == (optim, schedule)
    assert config.to_dict()["optim"] == optim


@pytest.mark.skipif(transformers.utils.is_torch_bf16_gpu_available(), reason="this is about machines without a GPU")
def test_bf16_without_a_gpu_keeps_the_launch(tmp_path, monkeypatch) -> None:
    theirs = inspect.unwrap(TrainingArguments._validate_args)  # a `ScalePlugin` in this process replaces it
    monkeypatch.setattr(TrainingArguments, "_validate_args", theirs)
    # The behaviour that the override replaces: transformers refuses.
    with pytest.raises(ValueError, match="use_cpu"):
        TrainingArguments(output_dir=str(tmp_path), bf16=True)
    config = RecipeSFTConfig(output_dir=str(tmp_path), bf16=True)
    assert config.bf16
    assert config.use_cpu is False
    assert config.device.type == "cpu"
    assert "self.use_cpu" in inspect.getsource(TrainingArguments._validate_args)
