"""Reward-model adapters merge into a language model's layers, or a reward model's, along with their score head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.inference.saved import find_saved
from accel_scale.merging.adapter import merge_adapter
from accel_scale.modeling.quantization_record import quantization_of, record_quantization

ROWS = torch.tensor([[1, 5, 9, 33, 2, 60], [8, 3, 12, 7, 50, 41]])
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name, tied in (("language", False), ("tied", True)):
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
        LlamaForCausalLM(config).save_pretrained(folder / name, max_shard_size="60KB")
    torch.manual_seed(2)
    load(folder / "language").save_pretrained(folder / "rewards")
    return folder


def train(model: Any) -> PeftModel:
    """Adapters and a head with all of their weights moved."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return adapted.eval()


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(input_ids=row[None]).logits for row in ROWS])


@pytest.mark.parametrize("base", ["language", "tied", "rewards"])
def test_the_merged_folder_is_a_reward_model_with_the_same_scores(bases: Path, tmp_path: Path, base: str) -> None:
    trained = train(load(bases / base))
    expected = scores(trained)
    trained.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "merged", max_shard_size="100KB")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(scores(merged), expected, rtol=1e-4, atol=1e-5)
    assert result.max_logit_diff is not None
    assert result.max_logit_diff < 1e-5
    assert (scores(load(bases / "rewards")) - expected).abs().max() > 1e-2, "the adapter does something"
    stored = {name for file in (tmp_path / "merged").glob("*.safetensors") for name in load_file(file)}
    assert "score.weight" in stored
    assert "lm_head.weight" not in stored
    for folder in ("adapter", "merged"):
        with pytest.raises(ConfigError, match="does not answer"):
            find_saved(str(tmp_path / folder))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


def test_a_4_bit_base_is_merged_as_it_was_trained_on(bases: Path, tmp_path: Path) -> None:
    base = load(bases / "language", quantization_config=NF4, dtype=torch.float32)
    record_quantization(tmp_path / "adapter", quantization_of(base))
    trained = train(base)
    trained.enable_input_require_grads()  # as in training: the inference kernel rounds to bf16
    expected = torch.cat([trained(input_ids=row[None]).logits.detach() for row in ROWS])
    trained.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    assert result.base_weights == "dequantized"
    found = scores(AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_classifier_is_no_base_of_it(bases: Path, tmp_path: Path) -> None:
    train(load(bases / "language")).save_pretrained(tmp_path / "adapter")
    config = LlamaConfig(**SIZES, **HEADS, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "classes")
    with pytest.raises(ConfigError, match="3 classes"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", base_model=str(tmp_path / "classes"))
