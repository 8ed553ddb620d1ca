"""Small real models to compare the planner's activations with: configurations, setups and both sets of figures."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.fused.own import fuse_own_layers
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.planning.tape.activations import step_bytes
from accel_scale.verifying.measured_memory import StorageTracker

SHAPE = {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 300, "num_hidden_layers": 5}
LATENT = {
    **SHAPE, "intermediate_size": 256, "pad_token_id": 0, "num_key_value_heads": 6, "q_lora_rank": 48,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GROUPED = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 256, "pad_token_id": 0}
FIELDS = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 48},
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 48},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 48},
    "phi3": GROUPED,
    "phi": {**GROUPED, "resid_pdrop": 0.0},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "glm": {**GROUPED, "head_dim": 16},
    "glm4": {**GROUPED, "head_dim": 16},
    "cohere": GROUPED,
    "cohere2": {**GROUPED, "sliding_window": 48},
    "smollm3": GROUPED,
    "granite": {**GROUPED, "logits_scaling": 8.0},
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "gpt_neox": {**SHAPE, "intermediate_size": 384},
    "opt": {**SHAPE, "ffn_dim": 384, "word_embed_proj_dim": 96, "dropout": 0.0},
    "gpt2": {
        "n_embd": 96, "n_head": 6, "n_layer": 5, "vocab_size": 300,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "falcon": {**SHAPE, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gptj": {"n_embd": 96, "n_head": 6, "n_layer": 5, "vocab_size": 300, "rotary_dim": 8, "n_positions": 128},
    "bloom": {"hidden_size": 96, "n_head": 6, "n_layer": 5, "vocab_size": 300},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "deepseek_v2": {**LATENT, "n_shared_experts": 2},
    "deepseek_v3": LATENT,
    "gpt_oss": {**GROUPED, "head_dim": 16, "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**GROUPED, "head_dim": 16, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **GROUPED, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 128, "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
# Families without sdpa.
EAGER_ONLY = ("gemma2", "gptj", "bloom", "gpt_oss")
# Config fields that change activations, other than dropout.
VARIANTS: dict[str, tuple[str, dict]] = {
    "olmo, clipped": ("olmo", {"clip_qkv": 8.0}),
    "cohere, norms for each head": ("cohere", {"use_qk_norm": True}),
    "deepseek_v2, groups of experts": ("deepseek_v2", {"topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek_v3, halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon, all heads": ("falcon", {"multi_query": False, "bias": True}),
    "falcon, ALiBi": ("falcon", {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
    "falcon, ALiBi and one head": ("falcon", {"alibi": True}),
}
# Models whose configurations drop values in training.
DROPOUTS: tuple[tuple[str, dict], ...] = (
    ("gpt2", {"resid_pdrop": 0.1}),
    ("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}),
    ("opt", {"dropout": 0.1}),
    ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.1}),
    ("phi", {"resid_pdrop": 0.1}),
    ("gpt_neox", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    ("falcon", {"hidden_dropout": 0.1, "attention_dropout": 0.1, "alibi": True, "parallel_attn": False}),
    ("gptj", {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}),
    ("bloom", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
)
PLAIN = TrainingSetup(
    precision="fp32", checkpointing="none", packing=False, micro_batch_size=2, sequence_length=96, loss="chunked"
)
LORA = replace(PLAIN, method="lora", precision="bf16", lora=LoraSetup(rank=8))


def real_bytes(architecture: str, setup: TrainingSetup, **fields) -> tuple[float, float]:
    """Bytes of a real pass, as (kept after the forward pass, peak), not counting the weights."""
    config = CONFIG_MAPPING[architecture](**{**FIELDS[architecture], **fields})
    config._attn_implementation = register_packed_attention() if setup.packing else setup.attention
    if setup.attention == "eager":
        config._attn_implementation = "eager"
    is_16_bit = setup.precision == "bf16_true" or (setup.method == "lora" and setup.precision == "bf16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if is_16_bit else torch.float32).train()
    base = model
    if setup.fused:
        assert set(fuse_own_layers(model)) == set(setup.fused)
    if setup.method == "lora":
        from peft import LoraConfig, get_peft_model

        targets = "all-linear" if setup.lora.targets == ("all-linear",) else list(setup.lora.targets)
        model = get_peft_model(model, LoraConfig(r=setup.lora.rank, target_modules=targets, use_dora=setup.lora.dora))
    if setup.loss == "chunked":
        add_fast_lm_head(base)
    policy = replace(CheckpointingPolicy.parse(setup.checkpointing), in_tiles=setup.long_rows)
    if policy != CheckpointingPolicy("none"):
        apply_checkpointing(model, policy)
    inputs = real_inputs(setup)
    tracker = StorageTracker()
    gc.collect()
    with tracker:
        with torch.autocast("cpu", dtype=torch.bfloat16) if setup.autocast else nullcontext():
            loss = model(**inputs, use_cache=False, **({"fast_lm_head": True} if setup.loss == "chunked" else {})).loss
        saved = tracker.live_bytes
        loss.backward()
    return saved, tracker.peak_bytes


def real_inputs(setup: TrainingSetup) -> dict[str, torch.Tensor]:
    shape = (setup.micro_batch_size, setup.sequence_length)
    ids = torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    if setup.mean_length is not None:
        lengths = torch.tensor([setup.sequence_length, round(2 * setup.mean_length) - setup.sequence_length])
        mask = torch.arange(setup.sequence_length)[None] < lengths[:, None]
        inputs |= {"attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}
    if setup.packing:
        inputs["position_ids"] = torch.cat([torch.arange(40), torch.arange(56)]).repeat(shape[0], 1)
    return inputs


def predicted(architecture: str, setup: TrainingSetup, **fields):
    config = CONFIG_MAPPING[architecture](**{**FIELDS[architecture], **fields}).to_dict()
    return step_bytes(facts_from_config(config, name=architecture), setup, is_cuda=False, is_tracked=True)
