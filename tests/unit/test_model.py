"""Models load with clear errors, and unsharded where a whole copy is wanted."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from transformers.integrations import deepspeed

from accel_scale.errors import ConfigError
from accel_scale.modeling.loading import count_parameters, load_config, load_model, load_tokenizer, plain_loading


def test_a_missing_folder_is_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"--model_name_or_path: there is no folder '\./nowhere'"):
        load_config("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)


def test_a_hub_model_that_cannot_be_reached_is_one_line(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        load_config("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)


def test_loading_in_the_dtype_asked_for(shared_data) -> None:
    path = str(shared_data / "stories260k")
    model = load_model(path, dtype=torch.bfloat16, attn_implementation="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert count_parameters(model) == (260_032, 260_032)
    assert load_tokenizer(path).pad_token is not None


def test_frozen_weights_are_counted_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    assert count_parameters(model) == (37, 12)


def test_plain_loading_hides_sharding_and_puts_it_back(monkeypatch) -> None:
    class Config:
        def is_zero3(self) -> bool:
            return True

    kept = Config()
    deepspeed.set_hf_deepspeed_config(kept)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert deepspeed.is_deepspeed_zero3_enabled()
    with plain_loading():
        assert not deepspeed.is_deepspeed_zero3_enabled()
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    assert deepspeed.is_deepspeed_zero3_enabled()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    deepspeed.unset_hf_deepspeed_config()
