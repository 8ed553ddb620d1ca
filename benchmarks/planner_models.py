"""Random small models and training setups for `planner_measure.py`."""

from __future__ import annotations

import tempfile
from random import Random
from typing import Any

import torch

from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.adapters import prepare_quantized_base
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup

NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
MIXTURES = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}
GROUPED = {
    "llama",
    "gemma",
    "phi",
    "stablelm",
    "olmo",
    "glm",
    "glm4",
    "cohere",
    "cohere2",
    "smollm3",
    "olmo2",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "granite",
    "phi3",
    "starcoder2",
    *MIXTURES,
}
WINDOWED = {"mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss"}
OWN_NAMES = {
    "gpt2": ("n_embd", "n_head", "n_layer"),
    "gptj": ("n_embd", "n_head", "n_layer"),
    "bloom": ("hidden_size", "n_head", "n_layer"),
    "opt": ("hidden_size", "num_attention_heads", "num_hidden_layers"),
}
LATENT = ("deepseek_v2", "deepseek_v3")
ARCHITECTURES = (
    *sorted(GROUPED - set(MIXTURES)), "gpt2", "gpt_neox", "opt", "falcon", "gptj", "bloom", *LATENT, *MIXTURES
)  # fmt: skip
EAGER_ONLY = ("gemma2", "gptj", "bloom", "gpt_oss")
SEES_NEIGHBOURS = ("opt", "falcon", "bloom")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch_fused", "adamw_torch_foreach", "sgd_momentum", "sgd", "adafactor")
POLICIES = ("none", "none", "full", "every_2", "selective", "offload")


def draw_config(architecture: str, rng: Random) -> Any:
    """Draw a small random configuration of an architecture, without dropout."""
    from transformers import CONFIG_MAPPING

    head_dim = rng.choice((16, 32))
    heads = rng.choice((2, 4))
    hidden, layers = head_dim * heads * rng.choice((1, 1, 2)), rng.randint(3, 7)
    heads = hidden // head_dim
    width = 32 * round(hidden * rng.uniform(1.5, 4) / 32)
    fields: dict[str, Any] = {"vocab_size": rng.choice((256, 500, 1000)), **NO_DROPOUT.get(architecture, {})}
    names = OWN_NAMES.get(architecture, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    fields |= dict(zip(names, (hidden, heads, layers), strict=True))
    if architecture in ("gpt2", "gptj"):
        fields |= {"n_positions": 1024, "n_inner": width} | ({"rotary_dim": 8} if architecture == "gptj" else {})
    elif architecture == "bloom":
        fields["tie_word_embeddings"] = True
    elif architecture == "falcon":
        fields |= {name: rng.random() < 0.5 for name in ("new_decoder_architecture", "multi_query", "alibi", "bias")}
        fields["num_kv_heads"] = rng.choice((1, heads)) if fields["new_decoder_architecture"] else heads
        fields["parallel_attn"] = fields["new_decoder_architecture"] or rng.random() < 0.5
    elif architecture == "opt":
        fields |= {"ffn_dim": width, "word_embed_proj_dim": hidden, "max_position_embeddings": 1024}
    else:
        fields |= {"intermediate_size": width, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        fields["tie_word_embeddings"] = rng.random() < 0.5
    if architecture in GROUPED:
        fields["num_key_value_heads"] = rng.choice([n for n in (1, 2, heads) if heads % n == 0])
    if architecture in ("qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe", "glm", "glm4", "gpt_oss"):
        fields["head_dim"] = head_dim
    if architecture in WINDOWED:
        fields["sliding_window"] = rng.choice((64, 4096))
    if architecture in LATENT:
        fields |= {
            "num_key_value_heads": heads,
            "qk_nope_head_dim": head_dim,
            "qk_rope_head_dim": 8,
            "v_head_dim": head_dim,
        }
        fields |= {"q_lora_rank": rng.choice((None, 24)), "kv_lora_rank": 32, "moe_intermediate_size": width // 2}
        fields |= {"n_routed_experts": rng.choice((4, 8)), "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        fields["first_k_dense_replace"] = 1
    if architecture == "granite":
        fields["logits_scaling"] = 8.0
    if architecture in MIXTURES:
        fields |= {MIXTURES[architecture]: rng.choice((4, 8)), "num_experts_per_tok": 2}
        if architecture not in ("mixtral", "gpt_oss"):
            fields |= {"moe_intermediate_size": width // 2, "shared_expert_intermediate_size": width}
    return CONFIG_MAPPING[architecture](**fields)


def draw_setup(architecture: str, rng: Random) -> TrainingSetup:
    """Draw a random training setup for an architecture."""
    method = rng.choice(("full", "full", "lora", "qlora"))
    precision = rng.choice(("fp32", "bf16", "bf16", "bf16_true")) if method == "full" else rng.choice(("fp32", "bf16"))
    attention = "eager" if architecture in EAGER_ONLY else rng.choice(("sdpa", "sdpa", "eager"))
    # In bf16 this project's CPU attention for packed rows uses another kernel, which is not relevant for plans. Some
    # architectures do not separate documents.
    can_pack = (
        architecture not in LATENT
        and attention == "sdpa"
        and precision == "fp32"
        and architecture not in SEES_NEIGHBOURS
    )
    packing = can_pack and rng.random() < 0.4
    policy = rng.choice([name for name in POLICIES if (architecture, name) != ("gpt_oss", "selective")])
    dora = method != "full" and architecture not in (*MIXTURES, *LATENT) and rng.random() < 0.25
    return TrainingSetup(
        method=method,
        precision=precision,
        optimizer=rng.choice(OPTIMIZERS),
        checkpointing=policy,
        attention=attention,
        loss=rng.choice(("chunked", "chunked", "full")),
        micro_batch_size=rng.choice((1, 2, 4)),
        sequence_length=rng.choice((128, 200, 256, 384)),
        packing=packing,
        double_quantisation=rng.random() < 0.5,
        lora=LoraSetup(rank=rng.choice((4, 16)), dora=dora),
    )


def build_model(config: Any, setup: TrainingSetup) -> Any:
    """Build the model with random weights, as the recipe would train it."""
    from transformers import AutoModelForCausalLM

    compute = torch.float32 if setup.precision == "fp32" else torch.bfloat16
    if setup.method == "qlora":
        return as_trained(_quantised(config, setup, compute), setup)
    is_16_bit = setup.precision == "bf16_true" or (setup.method == "lora" and setup.precision == "bf16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if is_16_bit else torch.float32)
    return as_trained(model, setup)


def as_trained(model: Any, setup: TrainingSetup) -> Any:
    """`model`, already loaded in its dtype, with adapters, loss and checkpointing policy applied."""
    import peft

    if setup.method == "qlora":
        model = prepare_quantized_base(model)
    if setup.method != "full":
        adapters = peft.LoraConfig(
            r=setup.lora.rank,
            use_dora=setup.lora.dora,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=True)
    if setup.loss == "chunked":
        add_fast_lm_head(model.get_base_model() if setup.method != "full" else model)
    if setup.checkpointing != "none":
        apply_checkpointing(model, CheckpointingPolicy.parse(setup.checkpointing))
    return model.train()


def _quantised(config: Any, setup: TrainingSetup, compute: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=setup.double_quantisation,
        bnb_4bit_compute_dtype=compute,
    )
    implementation = config._attn_implementation
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=compute).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=compute, attn_implementation=implementation, quantization_config=nf4
        )


def draw_inputs(config: Any, setup: TrainingSetup, rng: Random) -> dict[str, torch.Tensor]:
    """Draw token ids, also used as labels; packed rows hold documents of random lengths."""
    shape = (setup.micro_batch_size, setup.sequence_length)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    inputs = {"input_ids": ids, "labels": ids}
    if setup.packing:
        rows = []
        for _ in range(setup.micro_batch_size):
            cuts = sorted(rng.sample(range(8, setup.sequence_length - 8), 3))
            lengths = [b - a for a, b in zip([0, *cuts], [*cuts, setup.sequence_length], strict=True)]
            rows.append(torch.cat([torch.arange(length) for length in lengths]))
        inputs["position_ids"] = torch.stack(rows)
    return inputs
