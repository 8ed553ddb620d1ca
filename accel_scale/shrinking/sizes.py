"""Names of sizes in configurations, and the sizes of a shrunken model."""

from __future__ import annotations

HEAD_DIM = 16

# Names that configurations use for the same quantity.
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "num_decoder_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim")
# Widths that are the hidden size's.
AS_WIDE = ("word_embed_proj_dim", "adapter_in_dim", "adapter_input_size")
NUM_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads")
FEED_FORWARD = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner", "d_inner", "expert_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "dense_intermediate_size", "attention_hidden_size",
    "pronunciation_embed_dim", "shape_embed_dim", "encoder_ffn_dim", "decoder_ffn_dim",
)  # fmt: skip
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "moe_topk", "top_k_experts"
)  # fmt: skip
# State-space layers: heads and their sizes, which together are `expand` times as wide as the hidden size.
STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("n_mamba_heads", "mamba_headdim"),
    ("num_heads", "head_dim"),
)  # fmt: skip
EXPAND = ("mamba_expand", "expand")
# Upper limits of all other sizes: latent and linear attention, expert groups, windows, per-layer inputs.
LIMITS = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM, "rotary_dim": HEAD_DIM, "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM,
    "linear_head_dim": HEAD_DIM, "linear_num_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "global_head_dim": HEAD_DIM, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "sliding_window": 32, "attention_chunk_size": 32, "hidden_size_per_layer_input": 16,
    "num_nextn_predict_layers": 0, "state_size": 16, "mamba_d_state": 16, "ssm_state_size": 16, "time_step_rank": 8,
    "mamba_dt_rank": 8, "chunk_size": 32, "mamba_chunk_size": 32, "n_groups": 2, "mamba_n_groups": 2,
    "mamba_ngroups": 2, "adapter_rank": 8, "laurel_rank": 8, "window_size": 32, "context_length": 256,
}  # fmt: skip
