"""Shrunken models have the same class, keep what matters for a launch, and train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BailingHybridConfig,
    DbrxConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    ZambaConfig,
)

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.shrinking.layers import chosen_layers
from accel_scale.shrinking.model_source import load_model_config
from accel_scale.shrinking.shrink import shrink_config, write_shrunken_model

# As published on the hub, where this differs from the class's defaults.
REAL: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32,
        vocab_size=128256, bos_token_id=128000, eos_token_id=128001,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=24,
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=28, tie_word_embeddings=True,
    ),
    "mistral": MistralConfig(sliding_window=4096),
    "gemma3_text": Gemma3TextConfig(
        hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        num_hidden_layers=26, sliding_window=512,
    ),
    "qwen3_moe": Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8, decoder_sparse_step=2, mlp_only_layers=[3]),
    "mixtral": MixtralConfig(),
    "gpt_neox": GPTNeoXConfig(hidden_size=2560, intermediate_size=10240, num_attention_heads=32, num_hidden_layers=32),
    "phi3": Phi3Config(
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48, "long_factor": [1.5] * 48,
            "original_max_position_embeddings": 4096,
        },
        max_position_embeddings=131072,
    ),
    "gpt2": GPT2Config(),
    "gpt_oss": GptOssConfig(),
    "deepseek_v3": DeepseekV3Config(),
    "dbrx": DbrxConfig(
        d_model=6144, n_heads=48, n_layers=40, vocab_size=100352,
        attn_config={"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5},
        ffn_config={"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    ),
    "zamba": ZambaConfig(),
    "bailing_hybrid": BailingHybridConfig(),
}  # fmt: skip


@pytest.mark.parametrize("family", REAL)
def test_same_class_and_it_trains(family: str) -> None:
    torch.manual_seed(0)
    tiny = shrink_config(REAL[family], vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(tiny)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(REAL[family])
    assert type(model) is type(real)
    assert model.num_parameters() < 3_000_000
    assert tiny.vocab_size == 320, "rounded up to a multiple of 64"
    ids = torch.randint(3, 300, (2, 40))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(320.0).log().item(), abs=1.0), "random weights know nothing"
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert not unused


@pytest.mark.parametrize("family", REAL)
def test_every_module_of_the_real_model_has_its_like(family: str) -> None:
    """The same module names and classes, apart from layer numbers: what FSDP wraps and LoRA targets still exists."""
    tiny = shrink_config(REAL[family])
    with torch.device("meta"):
        pair = [AutoModelForCausalLM.from_config(config) for config in (REAL[family], tiny)]
    kinds = [
        {
            (".".join(part for part in name.split(".") if not part.isdigit()), type(m))
            for name, m in model.named_modules()
        }
        for model in pair
    ]
    assert kinds[0] == kinds[1]


def test_grouped_heads_keep_their_ratio() -> None:
    for family in ("llama", "qwen2", "qwen3", "gemma3_text"):
        real, tiny = REAL[family], shrink_config(REAL[family])
        assert (
            tiny.num_attention_heads // tiny.num_key_value_heads
            == real.num_attention_heads // real.num_key_value_heads
        )
        assert tiny.num_attention_heads % tiny.num_key_value_heads == 0


def test_sizes_in_sections_and_under_names_of_their_own_shrink_too() -> None:
    """DBRX keeps attention and experts in dictionaries; Bailing stores `n_group` as `num_expert_group`."""
    tiny, real = shrink_config(REAL["dbrx"]), REAL["dbrx"]
    assert tiny.n_heads // tiny.attn_config.kv_n_heads == real.n_heads // real.attn_config.kv_n_heads == 6
    assert tiny.num_key_value_heads == tiny.attn_config.kv_n_heads
    assert (tiny.ffn_config.moe_num_experts, tiny.ffn_config.moe_top_k) == (4, 2)
    assert tiny.ffn_config.hidden_size == tiny.d_model
    assert tiny.ffn_config.ffn_hidden_size == pytest.approx(10752 / 6144 * tiny.d_model, abs=16)
    assert (tiny.attn_config.rope_theta, tiny.attn_config.clip_qkv) == (5e5, 8), "no size"
    grouped = shrink_config(REAL["bailing_hybrid"])
    assert (grouped.n_group, grouped.topk_group, grouped.num_experts, grouped.num_experts_per_tok) == (2, 1, 4, 2)


def test_of_layers_that_share_weights_two_are_kept() -> None:
    tiny = shrink_config(REAL["zamba"])
    assert tiny.layers_block_type == ["linear_attention", "hybrid", "hybrid"]
    model = AutoModelForCausalLM.from_config(tiny)
    first, second = (layer.shared_transf for layer in model.model.layers[1:])
    assert [id(p) for p in first.parameters()] == [id(p) for p in second.parameters()]


def test_sliding_and_full_attention_are_both_kept_in_order() -> None:
    tiny = shrink_config(REAL["gemma3_text"])
    assert REAL["gemma3_text"].layer_types[:6] == ["sliding_attention"] * 5 + ["full_attention"]
    assert tiny.layer_types == ["sliding_attention", "full_attention"]
    assert tiny.sliding_window == 32


@pytest.mark.slow
def test_dense_and_expert_layers_are_both_kept() -> None:
    """Qwen3-MoE with experts in every second layer except number 3: dense, experts."""
    assert chosen_layers(REAL["qwen3_moe"].to_dict()) == [0, 1]
    tiny = shrink_config(REAL["qwen3_moe"])
    model = AutoModelForCausalLM.from_config(tiny)
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == ["Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"]
    assert (tiny.num_experts, tiny.num_experts_per_tok) == (4, 2)
    deepseek = AutoModelForCausalLM.from_config(shrink_config(REAL["deepseek_v3"]))
    assert [type(layer.mlp).__name__ for layer in deepseek.model.layers] == ["DeepseekV3MLP", "DeepseekV3MoE"]


def test_attention_wider_than_the_hidden_size_stays_so() -> None:
    tiny = shrink_config(REAL["qwen3"])
    assert tiny.head_dim * tiny.num_attention_heads != tiny.hidden_size
    llama = shrink_config(REAL["llama"])
    assert llama.head_dim * llama.num_attention_heads == llama.hidden_size
    assert llama.vocab_size == 128256, "kept with the model's own tokenizer"


def test_written_from_a_config_alone(tmp_path: Path) -> None:
    real = tmp_path / "real" / "config.json"
    real.parent.mkdir()
    REAL["llama"].save_pretrained(real.parent)
    tiny = write_shrunken_model(str(real), tmp_path / "tiny", fallback_tokenizer=default_model_path())
    assert tiny.architecture == "LlamaForCausalLM"
    assert tiny.num_layers == (32, 2)
    assert not tiny.own_tokenizer
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    assert model.num_parameters() == tiny.num_parameters
    saved = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert saved["vocab_size"] < 128256
    assert (tmp_path / "tiny" / "tokenizer.json").is_file()


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        load_model_config(str(tmp_path / "no-such-model"))


def test_the_catalogue_answers_where_the_hub_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated models whose configuration is widely known."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", _out_of_reach)
    config = load_model_config("meta-llama/Llama-3.1-8B")
    assert (config.model_type, config.num_hidden_layers, config.num_key_value_heads) == ("llama", 32, 8)
    with pytest.raises(ConfigError, match="cannot be had: no hub"):
        load_model_config("nobody/has-this")
    with pytest.raises(ConfigError, match="cannot be had: no hub"):
        load_model_config("Qwen/Qwen-7B")  # its code is not part of transformers


def _out_of_reach(*args: object, **kwargs: object) -> None:
    raise OSError("no hub")


def test_a_seed_gives_one_model_and_draws_nothing_from_the_run(tmp_path: Path) -> None:
    """Rehearsals are repeatable, and a run that makes a twin of its model keeps its own random state."""
    from safetensors.torch import load_file

    real = tmp_path / "real"
    REAL["llama"].save_pretrained(real)
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    made = []
    for name, seed in (("a", {}), ("b", {}), ("c", {"seed": 1})):
        torch.rand(3)  # random numbers that the run has drawn
        torch.random.set_rng_state(before)
        write_shrunken_model(str(real), tmp_path / name, fallback_tokenizer=default_model_path(), **seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        made.append(load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"])
        torch.manual_seed(12)
        before = torch.random.get_rng_state()
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
