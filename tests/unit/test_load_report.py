"""A checkpoint that does not match the model is refused, in one line that names the mismatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.integrations import HfDeepSpeedConfig

from accel_scale.errors import ConfigError
from accel_scale.modeling.load_report import fit_of, refuse_partial_load
from accel_scale.modeling.loading import load_model, skeleton_of

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def changed(base: Path, folder: Path, *, config=None, weights=None) -> Path:
    """A copy of `base` with `config` merged into config.json and its weights passed through `weights`."""
    folder.mkdir()
    values = json.loads((base / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(base / "model.safetensors")
    save_file(weights(tensors) if weights else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_model(str(folder), dtype=torch.float32)
    assert error.value.place == "--model_name_or_path"
    assert "\n" not in error.value.one_line()
    return error.value.problem


def test_more_layers_than_the_checkpoint_has(base, tmp_path):
    problem = refusal(changed(base, tmp_path / "m", config={"num_hidden_layers": 3}))
    assert "9 weights of the model are not in it (model.layers.2." in problem


def test_fewer_layers_than_the_checkpoint_has(base, tmp_path):
    problem = refusal(changed(base, tmp_path / "m", config={"num_hidden_layers": 1}))
    assert "9 weights in it are not in the model (model.layers.1." in problem


def test_another_width(base, tmp_path):
    problem = refusal(changed(base, tmp_path / "m", config={"intermediate_size": 48}))
    assert "6 weights have another shape" in problem
    assert "[32, 64] in the file, [32, 48] in the model" in problem


def test_one_lost_weight(base, tmp_path):
    def without_norm(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}

    problem = refusal(changed(base, tmp_path / "m", weights=without_norm))
    assert "1 weight of the model is not in it (model.norm.weight)" in problem


def test_what_is_in_order_loads(base, tmp_path):
    """A tied head that is not stored, an old buffer that the class knows, and 4-bit loading and saving all load."""
    assert load_model(str(base), dtype=torch.float32)
    tied = tmp_path / "tied"
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tied)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert load_model(str(tied), dtype=torch.float32)
    old = changed(
        base, tmp_path / "old", weights=lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    )
    assert load_model(str(old), dtype=torch.float32)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    load_model(str(base), dtype=torch.float32, quantization_config=nf4).save_pretrained(tmp_path / "nf4")
    assert load_model(str(tmp_path / "nf4"), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_names_alone_tell_the_same(tmp_path, kind):
    """Used where transformers does not check: under ZeRO-3 and before a merge."""
    config = LlamaConfig(**SIZES) if kind == "llama" else MixtralConfig(**SIZES, num_local_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    names = list(load_file(tmp_path / "model.safetensors"))
    whole = fit_of(skeleton_of(config), names)
    assert (whole["missing_keys"], whole["unexpected_keys"]) == (set(), set())
    lost = fit_of(skeleton_of(config), [*names[1:], "model.layers.7.mlp.up_proj.weight"])
    assert lost["missing_keys"] == {names[0]}
    assert lost["unexpected_keys"] == {"model.layers.7.mlp.up_proj.weight"}


def test_layers_that_zero3_leaves_out_in_silence_are_found_in_the_files(base):
    """Under ZeRO-3 transformers does not report weights that the model lacks."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))
    said_by_transformers = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"9 weights in it are not in the model \(model\.layers\.1\."):
        refuse_partial_load(model, said_by_transformers, name=str(base), place="--model_name_or_path")
    del zero3
    refuse_partial_load(model, said_by_transformers, name=str(base), place="--model_name_or_path")
