"""Small models of every supported architecture, really built on the meta device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.planning.models.model_config import MODEL_TYPES

IN_TRANSFORMERS = tuple(name for name in MODEL_TYPES if name != "qwen")


@st.composite
def configs(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """A small config of a family, with the fields that change its shapes drawn at random."""
    flag, kv, groups = st.booleans(), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    heads, dim = kv * groups, draw(st.sampled_from([8, 16]))
    hidden, layers = heads * dim * draw(st.sampled_from([1, 2])), draw(st.integers(1, 5))
    width, vocab = draw(st.sampled_from([24, 96])), draw(st.integers(50, 90))
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": draw(st.sampled_from([16, 64])),
        "tie_word_embeddings": draw(flag),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    optional = {"head_dim": draw(st.sampled_from([4, dim, 24])), "sliding_window": draw(st.sampled_from([4, 12]))}
    names = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "enable_bias", "use_sliding_window")
    switches = ("qk_layernorm", "use_qk_norm", "use_parallel_residual", "do_layer_norm_before", "bias")
    optional |= {name: draw(flag) for name in (*names, *switches, "layer_norm_elementwise_affine")}
    optional["max_window_layers"] = draw(st.integers(0, layers))
    known = vars(CONFIG_MAPPING[model_type]) | {"head_dim": None}
    config |= {name: value for name, value in optional.items() if draw(flag) and name in known}
    return {**_own_fields(draw, model_type, config), "model_type": model_type}


def _own_fields(draw: st.DrawFn, model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    flag = st.booleans()
    if model_type in ("gpt2", "gptj"):
        own = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
        config = {key: config[name] for key, name in own.items()} | {
            "vocab_size": config["vocab_size"],
            "n_positions": config["max_position_embeddings"],
            "tie_word_embeddings": model_type == "gpt2",
            "n_inner": draw(st.sampled_from([None, config["intermediate_size"]])),
        }
        return config | ({"rotary_dim": 4} if model_type == "gptj" else {})
    if model_type == "bloom":
        own = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_embed": "hidden_size"}
        return {key: config[name] for key, name in own.items()} | {"vocab_size": config["vocab_size"]}
    if model_type == "opt":
        config["word_embed_proj_dim"] = draw(st.sampled_from([8, config["hidden_size"]]))
        config["ffn_dim"] = config.pop("intermediate_size")
    if model_type == "falcon":
        kv = config.pop("num_key_value_heads")
        config |= {name: draw(flag) for name in ("new_decoder_architecture", "multi_query", "alibi")}
        config |= {"num_kv_heads": kv, "num_ln_in_parallel_attn": draw(st.sampled_from([None, 1, 2]))}
        config["parallel_attn"] = config["new_decoder_architecture"] or draw(flag)
    if model_type in ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe"):
        config["num_local_experts" if model_type in ("mixtral", "gpt_oss") else "num_experts"] = draw(
            st.integers(2, 5)
        )
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
        config |= {
            "decoder_sparse_step": draw(st.sampled_from([1, 2])),
            "mlp_only_layers": draw(st.just([0]) | st.none()),
        }
    if model_type in ("deepseek_v2", "deepseek_v3"):
        config["num_key_value_heads"] = config["num_attention_heads"]
        config |= {name: draw(st.sampled_from([8, 12])) for name in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank")}
        config |= {
            "q_lora_rank": draw(st.sampled_from([None, 10])),
            "qk_rope_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
        }
        config |= {"n_routed_experts": draw(st.integers(2, 5)), "n_shared_experts": draw(st.sampled_from([1, 2]))}
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
        config["first_k_dense_replace"] = draw(st.integers(0, 3))
    if model_type in ("phi", "stablelm", "opt", "falcon", "gpt_neox", "cohere2", "deepseek_v2", "deepseek_v3"):
        config.pop("head_dim", None)
    return config


def build(config: dict[str, Any]) -> nn.Module:
    """The real model on the meta device, which takes no memory."""
    fields = {name: value for name, value in config.items() if name != "model_type"}
    parsed = CONFIG_MAPPING[config["model_type"]](**fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(parsed)


def each_family(examples: int) -> Any:
    """Run a test on random configs of every architecture."""

    def decorate(check: Any) -> Any:
        @functools.wraps(check)
        def run(model_type: str) -> None:
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(configs(model_type))
            def on_config(config: dict[str, Any]) -> None:
                check(config)

            on_config()

        del run.__wrapped__
        return pytest.mark.parametrize("model_type", IN_TRANSFORMERS)(run)

    return decorate


DENSE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "intermediate_size": 48,
}
SPARSE = {**DENSE, "num_key_value_heads": 2, "moe_intermediate_size": 20, "num_experts": 3, "num_experts_per_tok": 2}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama", "num_key_value_heads": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50},
    "opt": {**DENSE, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16},
    "mixtral": {**DENSE, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 3},
    "deepseek_v3": {
        **DENSE, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 20,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "gpt_oss": {**DENSE, "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 3},
    "qwen2_moe": {**SPARSE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 28},
    "qwen3_moe": {**SPARSE, "model_type": "qwen3_moe", "decoder_sparse_step": 2},
}  # fmt: skip
