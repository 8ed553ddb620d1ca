"""How families with separate query, key and value projections differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.model_facts import MixtureFacts


@dataclass(frozen=True)
class ModelStyle:
    """What tells one such family from another. Biases are a fact or the name of the config's field.

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
        windows: The layers' windows.
        rotates: Tells from a layer's index, its window and the config whether it turns queries and keys.
        router: Name of the experts' router; with its bias, the experts have biases too.
        router_bias: Whether they do.
        sinks: Whether each head has a parameter of its own (gpt-oss).
        mixture: Reads the experts of a mixture, `None` for dense families.
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


_PLAIN = ModelStyle(qkv_bias=False, o_bias=False)
_QWEN_WINDOWS = typed_windows(late_layers)
_GEMMA = ModelStyle(num_norms=4, activation="hidden_activation")
_QWEN2 = ModelStyle(qkv_bias=True, o_bias=False, windows=_QWEN_WINDOWS)

STYLES: dict[str, ModelStyle] = {
    "llama": ModelStyle(mlp_bias="mlp_bias"),
    "mistral": replace(_PLAIN, windows=all_windows),
    "qwen2": _QWEN2,
    "qwen3": ModelStyle(query_key_norm="head", windows=_QWEN_WINDOWS),
    "gemma": ModelStyle(),
    "gemma2": replace(_GEMMA, windows=typed_windows(pattern(2))),
    "gemma3_text": replace(_GEMMA, query_key_norm="head", windows=typed_windows(pattern(6))),
    "phi3": replace(_PLAIN, fused_attention=True, fused_mlp=True, windows=all_windows),
    "stablelm": ModelStyle(
        qkv_bias="use_qkv_bias",
        o_bias=False,
        norm="layer",
        norm_weights=2,
        query_key_norm="whole",
        query_key_norm_flag="qk_layernorm",
        head_dim=False,
        parallel="use_parallel_residual",
    ),
    "starcoder2": ModelStyle(
        "use_bias", "use_bias", "use_bias", norm="layer", norm_weights=2, gated=False, windows=all_windows
    ),
    "olmo": ModelStyle(norm="layer", norm_weights=0),
    "olmo2": ModelStyle(query_key_norm="whole"),
    "olmo3": ModelStyle(query_key_norm="whole", windows=typed_windows(pattern(4))),
    "smollm3": ModelStyle(
        mlp_bias="mlp_bias",
        windows=typed_windows(lambda i, config: not has_rope(i, config)),
        rotates=lambda i, window, config: has_rope(i, config),
    ),
    "granite": ModelStyle(mlp_bias="mlp_bias"),
    "cohere": ModelStyle(
        norm="layer", num_norms=1, parallel=True, query_key_norm="whole", query_key_norm_flag="use_qk_norm"
    ),
    "cohere2": ModelStyle(
        norm="layer",
        num_norms=1,
        parallel=True,
        head_dim=False,
        windows=typed_windows(pattern(4)),
        rotates=lambda i, window, config: window is not None,
    ),
    "glm": ModelStyle(o_bias=False, fused_mlp=True),
    "glm4": ModelStyle(o_bias=False, fused_mlp=True, num_norms=4),
    "mixtral": replace(_PLAIN, windows=all_windows, mixture=_mixtral_experts),
    "gpt_oss": ModelStyle(
        windows=typed_windows(pattern(2)), router="router", router_bias=True, sinks=True, mixture=_mixtral_experts
    ),
    "qwen2_moe": ModelStyle(
        "qkv_bias",
        o_bias=False,
        mixture=_qwen_experts,
        windows=typed_windows(lambda i, config: i % 2 == 0 and i < int(config.get("max_window_layers"))),
    ),
    "qwen3_moe": ModelStyle(query_key_norm="head", windows=switched_windows, mixture=_qwen_experts),
}
