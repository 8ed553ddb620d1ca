"""Facts of BLOOM and Falcon."""

from __future__ import annotations

from typing import Any

from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.families import Heads, read_heads
from accel_scale.planning.models.model_facts import LinearFacts, ModelFacts
from accel_scale.planning.models.parts import two_layers, uniform_facts, whole_attention


def bloom_facts(config: ConfigFields, **named: Any) -> ModelFacts:
    return uniform_facts(
        config,
        read_heads(config, head_dim=False),
        attention=whole_attention(config, ("query_key_value", "dense"), bias=True),
        mlp=two_layers(config, ("dense_h_to_4h", "dense_4h_to_h")),
        activation="gelu_pytorch_tanh",
        max_positions=config.whole_or_none("seq_length") or config.whole("max_position_embeddings"),
        attention_dropout=config.largest("attention_dropout"),
        residual_dropout=config.largest("hidden_dropout"),
        outside_other_params=2 * config.whole("hidden_size"),
        layer_variant=_bloom_variant(config),
        embedding_name="word_embeddings",
        **named,
    )


def _bloom_variant(config: ConfigFields) -> str:
    if config.flag("slow_but_exact") and (config.whole_or_none("pretraining_tp") or 1) > 1:
        return "products in slices"
    return "residuals after norms" if config.flag("apply_residual_connection_post_layernorm") else ""


def _falcon_heads(config: ConfigFields) -> Heads:
    heads = read_heads(config, head_dim=False)
    if config.flag("new_decoder_architecture"):
        num_kv = config.whole_or_none("num_kv_heads") or heads.num
        if heads.num % num_kv:
            raise config.error("num_kv_heads", f"a divisor of num_attention_heads {heads.num}")
        return Heads(heads.num, num_kv, heads.dim)
    return Heads(heads.num, 1 if config.flag("multi_query") else heads.num, heads.dim)


def _falcon_variant(new: bool, parallel: bool, parallel_norms: int) -> str:
    """Name of Falcon's layout. transformers 5.23 cannot run the two layouts with names of several words."""
    if new and not parallel:
        return "new decoder without parallel attention"
    if not new and parallel and parallel_norms == 2:
        return "old decoder with two norms"
    return "grouped" if new else ""


def falcon_facts(config: ConfigFields, **named: Any) -> ModelFacts:
    hidden, heads, bias = config.whole("hidden_size"), _falcon_heads(config), config.flag("bias")
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    parallel_norms = config.whole_or_none("num_ln_in_parallel_attn") or (2 if new else 1)
    num_norms = (2 if parallel_norms == 2 else 1) if parallel else 2
    # FalconLinear is a subclass of nn.Linear: transformers 5 quantises only nn.Linear itself, so 4-bit loads skip it.
    width = config.whole_or_none("intermediate_size") or 4 * hidden
    sizes = {
        "query_key_value": (hidden, (heads.num + 2 * heads.num_kv) * heads.dim),
        "dense": (hidden, hidden),
        "dense_h_to_4h": (hidden, width),
        "dense_4h_to_h": (width, hidden),
    }
    linears = tuple(
        LinearFacts(name, *size, bias, quantisable=False, written_out=True) for name, size in sizes.items()
    )
    return uniform_facts(
        config,
        heads,
        attention=linears[:2],
        mlp=linears[2:],
        num_norms=num_norms,
        activation=config.text("activation"),
        parallel_residual=parallel,
        rotary_dims=0 if config.flag("alibi") else heads.dim,
        layer_variant=_falcon_variant(new, parallel, parallel_norms),
        attention_dropout=config.largest("attention_dropout"),
        residual_dropout=config.largest("hidden_dropout"),
        embedding_name="word_embeddings",
        **named,
    )
