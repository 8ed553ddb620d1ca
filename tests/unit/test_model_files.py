"""A model's folder by its headers alone: cut files, shapes that contradict the configuration, tokens without a row."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.modeling.files import check_model_files, check_row_length, check_tokenizer, longest_rows
from accel_scale.modeling.stored_weights import read_header, stored_shapes


def tokenizer() -> PreTrainedTokenizerFast:
    from accel_scale.modeling.loading import load_tokenizer

    return load_tokenizer(default_model_path())


def config(**changes: object) -> LlamaConfig:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaConfig(**{**shape, "vocab_size": len(tokenizer()), "num_key_value_heads": 2, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config()).save_pretrained(path)
    return path


def test_a_good_model_passes_and_its_shapes_are_read(folder: Path) -> None:
    check_model_files(str(folder), config(), tokenizer())
    assert stored_shapes(folder)["model.layers.0.self_attn.k_proj.weight"] == (16, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "in the weights, but this configuration makes it"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight is 16 × 32 in the weights"),
        ({"vocab_size": 99_999}, "this configuration makes it 99999"),
        ({"intermediate_size": 100}, "mlp"),
    ],
)
def test_a_configuration_that_is_not_the_weights_is_refused(folder: Path, changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_model_files(str(folder), config(**changes), tokenizer())
    assert str(caught.value.place) == str(folder / "config.json")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (0, "no safetensors file"),
        (4, "no safetensors file"),
        (8, "cut off after 8 bytes: its header"),
        (40, "cut off after 40 bytes: its header"),
        (-1, "cut off: it has"),
    ],
)
def test_cut_files_are_named_wherever_they_are_cut(tmp_path: Path, kept: int, said: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(3, 4)}, path)
    assert set(read_header(path)) == {"a", "b"}
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=said) as caught:
        stored_shapes(tmp_path)
    assert caught.value.place == str(path)


def test_pointers_missing_shards_and_other_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        read_header(path)
    path.write_bytes(struct.pack("<Q", 10) + b"no header!" + bytes(90))
    with pytest.raises(ConfigError, match="no safetensors file: its header"):
        read_header(path)
    path.write_bytes(struct.pack("<Q", 100_000_001) + bytes(90))
    with pytest.raises(ConfigError, match=r"no safetensors file\."):
        read_header(path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="the index names it"):
        stored_shapes(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="no index"):
        stored_shapes(tmp_path)


def test_tokens_beyond_the_embedding_are_refused_unless_no_text_gives_them() -> None:
    grown = tokenizer()
    rows = config(vocab_size=len(grown))
    grown.add_tokens(["<image>"], special_tokens=True)
    check_tokenizer(rows, grown, place="here")  # as in Gemma 3
    grown.add_special_tokens({"pad_token": "<another pad>"})
    with pytest.raises(ConfigError, match="embedding of") as caught:
        check_tokenizer(rows, grown, place="here")
    assert caught.value.place == "here"
    with pytest.raises(ConfigError, match="tokens up to"):
        check_tokenizer(config(vocab_size=100), tokenizer(), place="here")


def test_rows_end_where_positions_do() -> None:
    learned = GPT2Config(n_positions=64)
    assert longest_rows(learned) == 64
    check_row_length(learned, 64)
    check_row_length(learned, None)
    with pytest.raises(ConfigError, match="use 64 or less"):
        check_row_length(learned, 65, place="run.yaml:3")
    stretched = config(max_position_embeddings=512, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert longest_rows(stretched) == 2048
    with pytest.raises(ConfigError, match="2,048 positions"):
        check_row_length(stretched, 4096)
