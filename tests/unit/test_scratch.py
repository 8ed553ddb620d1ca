"""New models: shapes for a number of parameters, configurations from a file, the same weights for a seed."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaForCausalLM

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.modeling.loading import load_tokenizer
from accel_scale.modeling.scratch import (
    choose_shape,
    config_from_file,
    config_of_size,
    model_from_nothing,
    parse_count,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(default_model_path())


@pytest.mark.parametrize(
    ("text", "value"), [("124M", 124_000_000), ("1.3b", 1_300_000_000), ("800k", 800_000), ("2e9", 2e9), (512, 512)]
)
def test_amounts_are_read_as_people_write_them(text, value):
    assert parse_count(text, place="--num_params") == value


@pytest.mark.parametrize("text", ["", "many", "-3M", "0", "nan", "inf", "3X"])
def test_an_amount_that_is_none_is_one_clear_error(text):
    with pytest.raises(ConfigError, match=r"--num_params.*124M"):
        parse_count(text, place="--num_params")


@given(exponent=st.floats(6.3, 11.6), vocab=st.sampled_from([256, 8192, 32000]))
@settings(deadline=None, max_examples=30)
def test_any_size_gets_a_shape_within_ten_per_cent(exponent, vocab):
    wanted = round(10**exponent)
    if wanted < 3 * 64 * vocab:
        return  # the vocabulary alone takes most of it
    shape = choose_shape(wanted, vocab)
    assert abs(shape.num_params / wanted - 1) <= 0.1
    assert shape.hidden_size % shape.num_heads == 0
    assert 10 <= shape.hidden_size / shape.num_layers <= 400


def test_gpt2_s_size_gets_gpt2_s_shape():
    shape = choose_shape(124_000_000, 50_257)
    assert (shape.hidden_size, shape.num_layers, shape.num_heads, shape.tied) == (768, 12, 12, True)


def test_a_vocabulary_larger_than_the_model_is_refused_with_a_size_that_works():
    with pytest.raises(ConfigError, match=r"use 3\.\dM or more"):
        choose_shape(1_000_000, 50_257)
    assert choose_shape(3_500_000, 50_257).num_layers >= 2


@pytest.mark.parametrize("size", ["1M", "8M"])
def test_the_count_is_the_one_that_transformers_makes(size, tokenizer):
    wanted = parse_count(size, place="")
    config = config_of_size(wanted, vocab_size=len(tokenizer), max_length=256, tokenizer=tokenizer)
    with torch.device("meta"):
        built = LlamaForCausalLM(config).num_parameters()
    assert built == choose_shape(wanted, len(tokenizer)).num_params


def test_a_config_with_too_small_a_vocabulary_is_refused(tmp_path, tokenizer):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 100, "hidden_size": 64}))
    with pytest.raises(ConfigError, match=rf"vocab_size is 100 but the tokenizer has {len(tokenizer)}"):
        config_from_file(str(path), tokenizer=tokenizer)


def test_infinity_in_a_config_that_transformers_saved_is_read(tmp_path, tokenizer):
    AutoConfig.for_model("mamba2", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    config = config_from_file(str(tmp_path), tokenizer=tokenizer)
    assert list(config.time_step_limit) == [0.0, float("inf")]


@pytest.mark.parametrize("content", ["{", "[]", '{"hidden_size": 3}'])
def test_a_file_that_is_no_config_is_refused(tmp_path, content, tokenizer):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not a model's config"):
        config_from_file(str(tmp_path), tokenizer=tokenizer)


def test_weights_are_a_function_of_the_seed_and_not_of_the_precision(tokenizer):
    config = config_of_size(600_000, vocab_size=len(tokenizer), max_length=64, tokenizer=tokenizer)
    build = lambda seed, dtype: model_from_nothing(config, dtype=dtype, attention="sdpa", seed=seed)  # noqa: E731
    first, same, other = build(1, torch.float32), build(1, torch.float32), build(2, torch.float32)
    half = build(1, torch.bfloat16)
    weight = first.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, same.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(weight, other.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(weight.to(torch.bfloat16), half.model.layers[0].mlp.up_proj.weight)
