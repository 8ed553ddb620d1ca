"""A merged folder holds everything that vLLM, llama.cpp's converter and Ollama read (docs/after-training.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_scale.cli.main import main
from accel_scale.data.default import default_model_path


@pytest.mark.slow
def test_a_merged_folder_is_what_converters_read(tmp_path: Path, capsys) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(default_model_path()), LoraConfig(r=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(adapter)
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    tokenizer.save_pretrained(adapter)
    assert main(["merge", str(adapter), "--output_dir", str(merged), "--max_shard_size", "2MB"]) == 0

    config = json.loads((merged / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (merged / name).stat().st_size > 0, name
    assert not (merged / "adapter_config.json").exists()
    weight_map = json.loads((merged / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    assert len(files) > 1
    stored: set[str] = set()
    for file in files:
        with safe_open(merged / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            stored |= set(handle.keys())
    assert stored == set(weight_map)
    assert not any("lora" in name for name in stored)

    plain, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = tokenizer("The capital of", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        got, expected = plain(ids).logits.float(), model(ids).logits.float()
    assert float((got - expected).abs().max()) < 0.02 * float(expected.max() - expected.min())  # the weights are bf16
