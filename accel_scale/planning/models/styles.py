"""Architectures with separate query, key and value projections: one entry each, for the planner and the tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from accel_scale.planning.models.attention_windows import (
    Windows,
    all_windows,
    has_rope,
    late_layers,
    no_windows,
    pattern,
    switched_windows,
    typed_windows,
)
from accel_scale.planning.models.config_defaults import sizes
from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.model_facts import MixtureFacts


@dataclass(frozen=True)
class ModelStyle:
    """What distinguishes one such family from another. Biases are a bool or the name of the config's field.

    Attributes:
        qkv_bias: Bias of the query, key and value projections.
        o_bias: Bias of the attention's output projection.
        mlp_bias: Bias of the MLP.
        norm: ``rms`` or ``layer``.
        norm_weights: Parameters of a norm per normalised value: 2 with a bias, 0 without weights.
        num_norms: Norms over the hidden size in a layer.
        query_key_norm: ``no``, ``head`` (one for all heads) or ``whole`` (weights for every head).
        query_key_norm_flag: The config's field that turns it on; empty: always on.
        fused_attention: Whether query, key and value are one ``qkv_proj``.
        fused_mlp: Whether gate and up are one ``gate_up_proj``.
        gated: Whether the MLP is gated; otherwise it is ``c_fc`` and ``c_proj``.
        head_dim: Whether the class reads ``head_dim``.
        parallel: Whether attention and MLP read the same normalised input; or the name of the config's field.
        activation: The config's field that names the activation.
        windows: Attention windows of the layers.
        rotates: Tells from a layer's index, its window and the config whether it rotates queries and keys.
        router: Name of the experts' router.
        router_bias: Whether the router has a bias, and with it the experts.
        sinks: Whether each head has a sink parameter (gpt-oss).
        mixture: Reads the experts of a mixture; `None` for dense families.
        defaults: Defaults of its config class in transformers 5.23, for fields that a config.json leaves out.
        layers: The family of `planning.tape.families` with equivalent layers, unless it has its own there.
        tensor_parallel: Whether `accel_scale.parallel` divides its matrices.
    """

    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    norm: str = "rms"
    norm_weights: int = 1
    num_norms: int = 2
    query_key_norm: str = "no"
    query_key_norm_flag: str = ""
    fused_attention: bool = False
    fused_mlp: bool = False
    gated: bool = True
    head_dim: bool = True
    parallel: str | bool = False
    activation: str = "hidden_act"
    windows: Windows = no_windows
    rotates: Callable[[int, int | None, ConfigFields], bool] = lambda i, window, config: True
    router: str = "gate"
    router_bias: bool = False
    sinks: bool = False
    mixture: Callable[[ConfigFields], MixtureFacts] | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    layers: str = "llama"
    tensor_parallel: bool = True


def _mixtral_experts(config: ConfigFields) -> MixtureFacts:
    return MixtureFacts(
        num_experts=config.whole("num_local_experts"),
        experts_per_token=config.whole("num_experts_per_tok"),
        expert_intermediate_size=config.whole("intermediate_size"),
    )


def _qwen_experts(config: ConfigFields) -> MixtureFacts:
    shared = "shared_expert_intermediate_size"
    return MixtureFacts(
        num_experts=config.whole("num_experts"),
        experts_per_token=config.whole("num_experts_per_tok"),
        expert_intermediate_size=config.whole("moe_intermediate_size"),
        shared_intermediate_size=config.whole(shared) if shared in config.defaults else 0,
    )


_GEMMA_FIELDS = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_QWEN_FIELDS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_GLM = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
_PLAIN = ModelStyle(qkv_bias=False, o_bias=False)
_QWEN_WINDOWS = typed_windows(late_layers)
_GEMMA = ModelStyle(num_norms=4, activation="hidden_activation")
_QWEN2 = ModelStyle(qkv_bias=True, o_bias=False, windows=_QWEN_WINDOWS)

_GEMMA_DEFAULTS = sizes(
    256000, 3072, 28, 16, 24576, 8192, num_key_value_heads=16,
    **{**_GEMMA_FIELDS, "hidden_act": "gelu_pytorch_tanh"},
)  # fmt: skip
_GEMMA2_DEFAULTS = sizes(
    256000, 2304, 26, 8, 9216, 8192, num_key_value_heads=4, sliding_window=4096, final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0, **_GEMMA_FIELDS,
)  # fmt: skip
_STARCODER2_DEFAULTS = sizes(
    49152, 3072, 30, 24, 12288, 4096, num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", use_bias=True,
    tie_word_embeddings=True,
)  # fmt: skip
_SMOLLM3_DEFAULTS = sizes(
    128256, 2048, 36, 16, 11008, 32768, num_key_value_heads=4, use_sliding_window=False, tie_word_embeddings=True,
)  # fmt: skip
_GPT_OSS_DEFAULTS = sizes(
    201088, 2880, 36, 64, 2880, 131072, num_key_value_heads=8, head_dim=64, sliding_window=128,
    num_local_experts=128, num_experts_per_tok=4, attention_bias=True,
)  # fmt: skip
_QWEN2_MOE_DEFAULTS = sizes(
    151936, 2048, 24, 16, 5632, 32768, num_key_value_heads=16, qkv_bias=True, num_experts=60,
    num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, **_QWEN_FIELDS,
    **_SPARSE,
)  # fmt: skip
_QWEN3_MOE_DEFAULTS = sizes(
    151936, 2048, 24, 32, 6144, 32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, use_sliding_window=False, sliding_window=4096, **_SPARSE,
)  # fmt: skip

STYLES: dict[str, ModelStyle] = {
    "llama": ModelStyle(mlp_bias="mlp_bias", defaults=sizes(32000, 4096, 32, 32, 11008, 2048)),
    "mistral": replace(
        _PLAIN,
        windows=all_windows,
        defaults=sizes(32000, 4096, 32, 32, 14336, 131072, num_key_value_heads=8, sliding_window=4096),
    ),
    "qwen2": replace(
        _QWEN2, defaults=sizes(151936, 4096, 32, 32, 22016, 32768, num_key_value_heads=32, **_QWEN_FIELDS)
    ),
    "qwen3": ModelStyle(
        query_key_norm="head",
        windows=_QWEN_WINDOWS,
        defaults=sizes(151936, 4096, 32, 32, 22016, 32768, num_key_value_heads=32, head_dim=128, **_QWEN_FIELDS),
    ),
    "gemma": ModelStyle(defaults=_GEMMA_DEFAULTS),
    "gemma2": replace(
        _GEMMA,
        windows=typed_windows(pattern(2)),
        defaults=_GEMMA2_DEFAULTS,
    ),
    "gemma3_text": replace(
        _GEMMA,
        query_key_norm="head",
        windows=typed_windows(pattern(6)),
        defaults=sizes(262208, 2304, 26, 8, 9216, 131072, num_key_value_heads=4, sliding_window=4096, **_GEMMA_FIELDS),
    ),
    "phi3": replace(
        _PLAIN,
        fused_attention=True,
        fused_mlp=True,
        windows=all_windows,
        defaults=sizes(32064, 3072, 32, 32, 8192, 4096),
    ),
    "stablelm": ModelStyle(
        qkv_bias="use_qkv_bias",
        o_bias=False,
        norm="layer",
        norm_weights=2,
        query_key_norm="whole",
        query_key_norm_flag="qk_layernorm",
        head_dim=False,
        parallel="use_parallel_residual",
        defaults=sizes(50304, 2560, 32, 32, 6912, 4096, num_key_value_heads=32, partial_rotary_factor=0.25),
        tensor_parallel=False,
    ),
    "starcoder2": ModelStyle(
        "use_bias",
        "use_bias",
        "use_bias",
        norm="layer",
        norm_weights=2,
        gated=False,
        windows=all_windows,
        defaults=_STARCODER2_DEFAULTS,
    ),
    "olmo": ModelStyle(norm="layer", norm_weights=0, defaults=sizes(50304, 4096, 32, 32, 11008, 2048)),
    "olmo2": ModelStyle(query_key_norm="whole", defaults=sizes(50304, 4096, 32, 32, 11008, 2048)),
    "olmo3": ModelStyle(
        query_key_norm="whole",
        windows=typed_windows(pattern(4)),
        defaults=sizes(50304, 4096, 32, 32, 11008, 2048, sliding_window=4096),
    ),
    "smollm3": ModelStyle(
        mlp_bias="mlp_bias",
        windows=typed_windows(lambda i, config: not has_rope(i, config)),
        rotates=lambda i, window, config: has_rope(i, config),
        defaults=_SMOLLM3_DEFAULTS,
    ),
    "granite": ModelStyle(mlp_bias="mlp_bias", defaults=sizes(32000, 4096, 32, 32, 11008, 2048)),
    "cohere": ModelStyle(
        norm="layer",
        num_norms=1,
        parallel=True,
        query_key_norm="whole",
        query_key_norm_flag="use_qk_norm",
        defaults=sizes(256000, 8192, 40, 64, 22528, 8192, tie_word_embeddings=True),
    ),
    "cohere2": ModelStyle(
        norm="layer",
        num_norms=1,
        parallel=True,
        head_dim=False,
        windows=typed_windows(pattern(4)),
        rotates=lambda i, window, config: window is not None,
        defaults=sizes(256000, 8192, 40, 64, 22528, 8192, sliding_window=4096, tie_word_embeddings=True),
    ),
    "glm": ModelStyle(o_bias=False, fused_mlp=True, defaults=sizes(151552, 4096, 40, 32, 13696, 131072, **_GLM)),
    "glm4": ModelStyle(
        o_bias=False, fused_mlp=True, num_norms=4, defaults=sizes(151552, 4096, 40, 32, 13696, 131072, **_GLM)
    ),
    "mixtral": replace(
        _PLAIN,
        windows=all_windows,
        mixture=_mixtral_experts,
        defaults=sizes(
            32000, 4096, 32, 32, 14336, 131072, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
        ),
        tensor_parallel=False,
    ),
    "gpt_oss": ModelStyle(
        windows=typed_windows(pattern(2)),
        router="router",
        router_bias=True,
        sinks=True,
        mixture=_mixtral_experts,
        defaults=_GPT_OSS_DEFAULTS,
        tensor_parallel=False,
    ),
    "qwen2_moe": ModelStyle(
        "qkv_bias",
        o_bias=False,
        mixture=_qwen_experts,
        windows=typed_windows(lambda i, config: i % 2 == 0 and i < int(config.get("max_window_layers"))),
        defaults=_QWEN2_MOE_DEFAULTS,
        tensor_parallel=False,
    ),
    "qwen3_moe": ModelStyle(
        query_key_norm="head",
        windows=switched_windows,
        mixture=_qwen_experts,
        defaults=_QWEN3_MOE_DEFAULTS,
        tensor_parallel=False,
    ),
}
