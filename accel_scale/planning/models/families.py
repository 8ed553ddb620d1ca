"""Facts of models with separate query, key and value projections: Llama and its descendants, mixtures included."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, MixtureFacts, ModelFacts
from accel_scale.planning.models.styles import ModelStyle


@dataclass(frozen=True)
class Heads:
    """The attention's shape: query heads, key and value heads, and the width of one."""

    num: int
    num_kv: int
    dim: int


def read_heads(config: ConfigFields, *, head_dim: bool = True) -> Heads:
    """Read the heads from a config.

    Raises:
        ConfigError: if the heads do not divide the hidden size, or key and value heads do not divide query heads.
    """
    hidden, num = config.whole("hidden_size"), config.whole("num_attention_heads")
    num_kv = config.whole_or_none("num_key_value_heads") or num
    dim = config.whole_or_none("head_dim") if head_dim else None
    if dim is None and hidden % num:
        raise config.error("num_attention_heads", f"a divisor of hidden_size {hidden}")
    if num % num_kv:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads {num}")
    return Heads(num, num_kv, dim or hidden // num)


def _attention(config: ConfigFields, style: ModelStyle, heads: Heads) -> tuple[LinearFacts, ...]:
    hidden, bias = config.whole("hidden_size"), config.flag(style.qkv_bias)
    queries, keys = heads.num * heads.dim, heads.num_kv * heads.dim
    output = LinearFacts("o_proj", queries, hidden, config.flag(style.o_bias))
    if style.fused_attention:
        return (LinearFacts("qkv_proj", hidden, queries + 2 * keys, bias), output)
    projections = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    return (*(LinearFacts(name, hidden, size, bias) for name, size in projections), output)


def _mlp(config: ConfigFields, style: ModelStyle, intermediate: int) -> tuple[LinearFacts, ...]:
    hidden, bias = config.whole("hidden_size"), config.flag(style.mlp_bias)
    if not style.gated:
        return (LinearFacts("c_fc", hidden, intermediate, bias), LinearFacts("c_proj", intermediate, hidden, bias))
    down = LinearFacts("down_proj", intermediate, hidden, bias)
    if style.fused_mlp:
        return (LinearFacts("gate_up_proj", hidden, 2 * intermediate, bias), down)
    return (*(LinearFacts(name, hidden, intermediate, bias) for name in ("gate_proj", "up_proj")), down)


# The names by which PEFT 0.21 knows experts that transformers 5 keeps as one tensor; Qwen2-MoE has none.
_EXPERT_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "mixtral": (("gate",), ("w1", "w3"), ("w2",)),
    "qwen3_moe": (("gate",), ("gate_proj", "up_proj"), ("down_proj",)),
}


def _mixture_mlp(
    config: ConfigFields, style: ModelStyle, mixture: MixtureFacts, model_type: str
) -> tuple[LinearFacts, ...]:
    hidden, width = config.whole("hidden_size"), mixture.expert_intermediate_size
    bias = style.router_bias
    router, fused, down = _EXPERT_NAMES.get(model_type, ((), (), ()))
    stacked: dict[str, Any] = {
        "copies": mixture.num_experts,
        "active_copies": mixture.experts_per_token,
        "quantisable": False,
    }
    linears = (
        LinearFacts(style.router, hidden, mixture.num_experts, bias, quantisable=False, lora_names=router),
        LinearFacts("gate_up_proj", hidden, 2 * width, bias, lora_names=fused, **stacked),
        LinearFacts("down_proj", width, hidden, bias, lora_names=down, **stacked),
    )
    if not mixture.shared_intermediate_size:
        return linears
    shared = _mlp(config, style, mixture.shared_intermediate_size)
    return (*linears, *shared, LinearFacts("shared_expert_gate", hidden, 1))


def _query_key_norm_params(config: ConfigFields, style: ModelStyle, heads: Heads) -> int:
    if style.query_key_norm == "no" or (style.query_key_norm_flag and not config.flag(style.query_key_norm_flag)):
        return 0
    return (2 if style.query_key_norm == "head" else heads.num + heads.num_kv) * heads.dim


def _sparse_layers(config: ConfigFields, style: ModelStyle) -> tuple[bool, ...]:
    count = config.whole("num_hidden_layers")
    if "decoder_sparse_step" not in config.defaults:
        return (style.mixture is not None,) * count
    step, dense = config.whole("decoder_sparse_step"), config.get("mlp_only_layers") or ()
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(count))


def _layers(config: ConfigFields, style: ModelStyle, heads: Heads, model_type: str) -> tuple[LayerFacts, ...]:
    hidden, extra_norms = config.whole("hidden_size"), _query_key_norm_params(config, style, heads)
    parallel = config.flag(style.parallel)
    num_norms = 1 if parallel else style.num_norms
    sparse, windows = _sparse_layers(config, style), style.windows(config)
    turning = [style.rotates(i, window, config) for i, window in enumerate(windows)]
    mixture = style.mixture(config) if style.mixture and any(sparse) else None
    dense_mlp = () if mixture and all(sparse) else _mlp(config, style, config.whole("intermediate_size"))
    if model_type in _EXPERT_NAMES:
        # PEFT takes the names of these modules for the experts', so it leaves the dense layers' modules alone.
        dense_mlp = tuple(replace(linear, lora_names=()) for linear in dense_mlp)
    sparse_mlp = _mixture_mlp(config, style, mixture, model_type) if mixture else ()
    return tuple(
        LayerFacts(
            count=count,
            attention=_attention(config, style, heads),
            mlp=sparse_mlp if is_sparse else dense_mlp,
            norm_params=num_norms * style.norm_weights * hidden + extra_norms,
            num_norms=num_norms,
            query_key_norm=extra_norms > 0,
            sliding_window=window,
            mixture=mixture if is_sparse else None,
            rotates=rotates,
            other_params=heads.num if style.sinks else 0,
        )
        for (window, is_sparse, rotates), count in Counter(zip(windows, sparse, turning, strict=True)).items()
    )


def _unquantised_last_linear(layers: tuple[LayerFacts, ...]) -> tuple[LayerFacts, ...]:
    """The layers if transformers keeps the model's last parameter, the last ``down_proj``, in 16 bits."""
    *first, last = layers
    mlp = tuple(replace(item, quantisable=item.name != "down_proj") for item in last.mlp)
    rest = (replace(last, count=last.count - 1),) if last.count > 1 else ()
    return (*first, *rest, replace(last, count=1, mlp=mlp))


def llama_like_facts(config: ConfigFields, style: ModelStyle, *, name: str, model_type: str) -> ModelFacts:
    """Facts of a model with one of the `STYLES`.

    Raises:
        ConfigError: if a field has an impossible value.
    """
    hidden, heads = config.whole("hidden_size"), read_heads(config, head_dim=style.head_dim)
    layers, tied = _layers(config, style, heads, model_type), config.flag("tie_word_embeddings")
    activation = config.text(style.activation)
    parallel = config.flag(style.parallel)
    return ModelFacts(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        num_heads=heads.num,
        num_kv_heads=heads.num_kv,
        head_dim=heads.dim,
        intermediate_size=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        tied_embeddings=tied,
        gated_mlp=style.gated,
        activation="gelu_pytorch_tanh" if (model_type, activation) == ("gemma", "gelu") else activation,
        norm=style.norm,
        layers=_unquantised_last_linear(layers) if tied and not style.norm_weights else layers,
        parallel_residual=parallel,
        rotary_dims=int(heads.dim * config.fraction("partial_rotary_factor")),
        final_norm_params=style.norm_weights * hidden,
        max_positions=config.whole("max_position_embeddings"),
        attention_dropout=config.largest("attention_dropout"),
        embedding_dropout=config.largest("embd_pdrop", "embedding_dropout"),
        residual_dropout=config.largest("resid_pdrop", "residual_dropout", "hidden_dropout"),
        logit_softcap=config.get("final_logit_softcapping") is not None,
        attention_softcap=config.get("attn_logit_softcapping") is not None,
        projection_clip=config.get("clip_qkv") is not None,
        layer_variant=_variant(config, model_type),
    )


def _variant(config: ConfigFields, model_type: str) -> str:
    if model_type == "stablelm" and config.flag("qk_layernorm"):
        return "norms of each head"
    return "unscaled" if _logit_factor(config, model_type) == 1 else ""


def _logit_factor(config: ConfigFields, model_type: str) -> object:
    """The factor that divides or multiplies logits; transformers' default if the config has none."""
    name, default = {"granite": ("logits_scaling", 1.0)}.get(model_type, ("logit_scale", None))
    value = config.get(name)
    return default if value is None else value
