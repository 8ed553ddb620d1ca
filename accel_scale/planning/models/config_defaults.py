"""Defaults of transformers 5.23's config classes for fields missing in a config.json (Llama-like: see `styles`)."""

from __future__ import annotations

from typing import Any

# Fields that several classes share; a class's own row wins.
_SHARED: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0}


def sizes(
    vocab: int, hidden: int, layers: int, heads: int, intermediate: int, positions: int, **others: Any
) -> dict[str, Any]:
    """Defaults by field name."""
    return {
        **_SHARED,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        **others,
    }


def _without_width(*given: int, **others: object) -> dict[str, Any]:
    """Defaults of a class whose MLP is 4 hidden sizes wide if its width is not given."""
    vocab, hidden, layers, heads, positions = given
    return {**sizes(vocab, hidden, layers, heads, 1, positions, **others), "intermediate_size": None}


DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": sizes(
        102400,
        4096,
        32,
        32,
        11008,
        2048,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=0,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1407,
    ),
    "deepseek_v3": sizes(
        129280,
        7168,
        61,
        128,
        18432,
        4096,
        num_key_value_heads=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=3,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        rope_interleave=True,
    ),
    "phi": sizes(51200, 2048, 24, 32, 8192, 2048, hidden_act="gelu_new", partial_rotary_factor=0.5),
    "gpt2": _without_width(
        50257,
        768,
        12,
        12,
        1024,
        activation_function="gelu_new",
        resid_pdrop=0.1,
        attn_pdrop=0.1,
        embd_pdrop=0.1,
        tie_word_embeddings=True,
    ),
    "gptj": _without_width(50400, 4096, 28, 16, 2048, activation_function="gelu_new", rotary_dim=64),
    "gpt_neox": sizes(
        50432,
        6144,
        44,
        64,
        24576,
        2048,
        hidden_act="gelu",
        partial_rotary_factor=0.25,
        use_parallel_residual=True,
        attention_bias=True,
    ),
    "opt": sizes(
        50272,
        768,
        12,
        12,
        3072,
        2048,
        activation_function="relu",
        dropout=0.1,
        do_layer_norm_before=True,
        enable_bias=True,
        layer_norm_elementwise_affine=True,
        tie_word_embeddings=True,
    ),
    "bloom": _without_width(250880, 64, 2, 8, 2048, tie_word_embeddings=True),
    "falcon": _without_width(
        65024, 4544, 32, 71, 2048, activation="gelu", multi_query=True, parallel_attn=True, tie_word_embeddings=True
    ),
    # Remote code on the hub, without a class in transformers: its configuration_qwen.py.
    "qwen": sizes(
        151936, 4096, 32, 32, 22016, 32768, kv_channels=128, no_bias=True, rotary_pct=1.0, attn_dropout_prob=0.0
    ),
}

_GPT_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
}
# Classes that do not read ``intermediate_size``.
OWN_WIDTHS = ("gpt2", "gptj", "bloom", "falcon", "opt")
# Class-specific names of fields, and the common names.
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": _GPT_NAMES,
    "gptj": _GPT_NAMES,
    "bloom": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size"},
    "falcon": {"n_embed": "hidden_size", "ffn_hidden_size": "intermediate_size"},
    "opt": {"ffn_dim": "intermediate_size"},
    "gpt_neox": {"rotary_pct": "partial_rotary_factor"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
}
