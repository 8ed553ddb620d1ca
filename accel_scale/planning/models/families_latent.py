"""Facts of DeepSeek V2 and V3 (and R1): latent attention, and routed experts with a shared one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, MixtureFacts, ModelFacts


def latent_facts(config: ConfigFields, *, name: str, model_type: str) -> ModelFacts:
    """Facts of a DeepSeek model; the modules that predict further tokens are not part of the class's training.

    Raises:
        ConfigError: if a field has an impossible value.
    """
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if (config.whole_or_none("num_key_value_heads") or heads) != heads:
        raise config.error("num_key_value_heads", f"the number of attention heads {heads}")
    turned, value = config.whole("qk_rope_head_dim"), config.whole("v_head_dim")
    attention, norms = _attention(config, heads, turned, value)
    count = config.whole("num_hidden_layers")
    dense = min(_count(config, "first_k_dense_replace"), count)
    common: dict[str, Any] = {"attention": attention, "norm_params": 2 * hidden + norms}
    layers = []
    if dense:
        layers.append(LayerFacts(count=dense, mlp=_gated(config, config.whole("intermediate_size")), **common))
    if count > dense:
        mixture = _mixture(config)
        layers.append(LayerFacts(count=count - dense, mlp=_experts(config, mixture), mixture=mixture, **common))
    is_interleaved = model_type == "deepseek_v2" or config.flag("rope_interleave")
    return ModelFacts(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.whole("qk_nope_head_dim") + turned,
        value_dim=value,
        intermediate_size=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        gated_mlp=True,
        activation=config.text("hidden_act"),
        norm="rms",
        layers=tuple(layers),
        rotary_dims=turned,
        final_norm_params=hidden,
        max_positions=config.whole("max_position_embeddings"),
        attention_dropout=config.largest("attention_dropout"),
        layer_variant="" if is_interleaved else "halves",
    )


def _attention(config: ConfigFields, heads: int, turned: int, value: int) -> tuple[tuple[LinearFacts, ...], int]:
    """The projections, and the parameters of the norms between them."""
    hidden, bias, latent = (
        config.whole("hidden_size"),
        config.flag("attention_bias"),
        config.whole("kv_lora_rank"),
    )
    plain, rank = config.whole("qk_nope_head_dim"), config.whole_or_none("q_lora_rank")
    queries = heads * (plain + turned)
    if rank is None:
        query: tuple[LinearFacts, ...] = (LinearFacts("q_proj", hidden, queries),)
    else:
        query = (LinearFacts("q_a_proj", hidden, rank, bias), LinearFacts("q_b_proj", rank, queries))
    rest = (
        LinearFacts("kv_a_proj_with_mqa", hidden, latent + turned, bias),
        LinearFacts("kv_b_proj", latent, heads * (plain + value)),
        LinearFacts("o_proj", heads * value, hidden, bias),
    )
    return (*query, *rest), (rank or 0) + latent


def _mixture(config: ConfigFields) -> MixtureFacts:
    width = config.whole("moe_intermediate_size")
    return MixtureFacts(
        num_experts=config.whole("n_routed_experts"),
        experts_per_token=config.whole("num_experts_per_tok"),
        expert_intermediate_size=width,
        shared_intermediate_size=width * config.whole("n_shared_experts"),
    )


def _gated(config: ConfigFields, width: int) -> tuple[LinearFacts, ...]:
    hidden, bias = config.whole("hidden_size"), config.flag("mlp_bias")
    # PEFT 0.21 takes these names for the experts', so it leaves dense layers and shared experts alone.
    sides = (LinearFacts(name, hidden, width, bias, lora_names=()) for name in ("gate_proj", "up_proj"))
    return (*sides, LinearFacts("down_proj", width, hidden, bias, lora_names=()))


def _experts(config: ConfigFields, mixture: MixtureFacts) -> tuple[LinearFacts, ...]:
    hidden, width = config.whole("hidden_size"), mixture.expert_intermediate_size
    stacked: dict[str, Any] = {
        "copies": mixture.num_experts,
        "active_copies": mixture.experts_per_token,
        "quantisable": False,
    }
    return (
        LinearFacts("gate", hidden, mixture.num_experts, quantisable=False, lora_names=("gate",)),
        LinearFacts("gate_up_proj", hidden, 2 * width, lora_names=("gate_proj", "up_proj"), **stacked),
        LinearFacts("down_proj", width, hidden, lora_names=("down_proj",), **stacked),
        *_gated(config, mixture.shared_intermediate_size),
    )


def _count(config: ConfigFields, name: str) -> int:
    """A whole number that may be 0."""
    return config.whole(name) if config.get(name) else 0


LATENT: dict[str, Callable[..., ModelFacts]] = {"deepseek_v2": latent_facts, "deepseek_v3": latent_facts}
