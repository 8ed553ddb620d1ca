"""Facts of the families before Llama: GPT-2, GPT-J, GPT-NeoX, OPT, Phi, the first Qwen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.families import Heads, read_heads
from accel_scale.planning.models.families_falcon import bloom_facts, falcon_facts
from accel_scale.planning.models.model_facts import LinearFacts, ModelFacts
from accel_scale.planning.models.parts import two_layers, uniform_facts, whole_attention


def _gpt2(config: ConfigFields, **named: Any) -> ModelFacts:
    positions = config.whole("max_position_embeddings")
    return uniform_facts(
        config,
        read_heads(config, head_dim=False),
        attention=whole_attention(config, ("c_attn", "c_proj"), bias=True),
        mlp=two_layers(config, ("c_fc", "c_proj")),
        activation=config.text("activation_function"),
        position_params=positions * config.whole("hidden_size"),
        attention_dropout=config.largest("attn_pdrop"),
        embedding_dropout=config.largest("embd_pdrop"),
        residual_dropout=config.largest("resid_pdrop"),
        embedding_name="wte",
        layer_variant="scores in fp32" if config.flag("reorder_and_upcast_attn") else "",
        **named,
    )


def _gptj(config: ConfigFields, **named: Any) -> ModelFacts:
    heads = read_heads(config, head_dim=False)
    rotary_dims = config.whole_or_none("rotary_dim") or heads.dim
    positions = config.whole("max_position_embeddings")
    return uniform_facts(
        config,
        heads,
        attention=whole_attention(config, ("q_proj", "k_proj", "v_proj", "out_proj"), bias=False),
        mlp=two_layers(config, ("fc_in", "fc_out")),
        num_norms=1,
        activation=config.text("activation_function"),
        parallel_residual=True,
        rotary_dims=rotary_dims,
        # Every layer has a table of sines and cosines in fp32.
        buffer_bytes=config.whole("num_hidden_layers") * positions * rotary_dims * 4,
        head_bias=True,
        attention_dropout=config.largest("attn_pdrop"),
        embedding_dropout=config.largest("embd_pdrop"),
        residual_dropout=config.largest("resid_pdrop"),
        embedding_name="wte",
        **named,
    )


def _gpt_neox(config: ConfigFields, **named: Any) -> ModelFacts:
    heads = read_heads(config, head_dim=False)
    return uniform_facts(
        config,
        heads,
        attention=whole_attention(config, ("query_key_value", "dense"), bias=config.flag("attention_bias")),
        mlp=two_layers(config, ("dense_h_to_4h", "dense_4h_to_h")),
        activation=config.text("hidden_act"),
        parallel_residual=config.flag("use_parallel_residual"),
        rotary_dims=int(heads.dim * config.fraction("partial_rotary_factor")),
        attention_dropout=config.largest("attention_dropout"),
        embedding_dropout=config.largest("hidden_dropout"),
        residual_dropout=config.largest("hidden_dropout"),
        embedding_name="embed_in",
        **named,
    )


def _opt(config: ConfigFields, **named: Any) -> ModelFacts:
    hidden, bias = config.whole("hidden_size"), config.flag("enable_bias")
    embedding = config.whole_or_none("word_embed_proj_dim") or hidden
    norm_weights = 2 if config.flag("layer_norm_elementwise_affine") else 0
    final_norm = config.flag("do_layer_norm_before") and not config.flag("_remove_final_layer_norm")
    projections = (LinearFacts("project_in", embedding, hidden), LinearFacts("project_out", hidden, embedding))
    is_usual = final_norm and norm_weights and embedding == hidden
    return uniform_facts(
        config,
        read_heads(config, head_dim=False),
        attention=whole_attention(config, ("q_proj", "k_proj", "v_proj", "out_proj"), bias=bias),
        mlp=two_layers(config, ("fc1", "fc2"), bias=bias),
        norm_params=2 * norm_weights * hidden,
        final_norm_params=norm_weights * hidden if final_norm else 0,
        activation=config.text("activation_function"),
        # The class leaves two rows free before position 0.
        position_params=(config.whole("max_position_embeddings") + 2) * hidden,
        attention_dropout=config.largest("attention_dropout"),
        residual_dropout=config.largest("dropout"),
        embedding_size=0 if embedding == hidden else embedding,
        outside_linears=() if embedding == hidden else projections,
        layer_variant="" if is_usual else "other norms or a narrower embedding",
        **named,
    )


def _phi(config: ConfigFields, **named: Any) -> ModelFacts:
    hidden, heads = config.whole("hidden_size"), read_heads(config)
    queries, keys = heads.num * heads.dim, heads.num_kv * heads.dim
    projections = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    query_key_norm = config.flag("qk_layernorm")
    return uniform_facts(
        config,
        heads,
        attention=(
            *(LinearFacts(item, hidden, size, True) for item, size in projections),
            LinearFacts("dense", queries, hidden, True),
        ),
        mlp=two_layers(config, ("fc1", "fc2")),
        num_norms=1,
        norm_params=2 * hidden + (4 * (hidden // heads.num) if query_key_norm else 0),
        query_key_norm=query_key_norm,
        activation=config.text("hidden_act"),
        parallel_residual=True,
        rotary_dims=int(heads.dim * config.fraction("partial_rotary_factor")),
        head_bias=True,
        attention_dropout=config.largest("attention_dropout"),
        residual_dropout=config.largest("resid_pdrop"),
        **named,
    )


def _qwen(config: ConfigFields, **named: Any) -> ModelFacts:
    """The first Qwen's remote code: ``intermediate_size`` is the width of w1 and w2 together."""
    hidden, num = config.whole("hidden_size"), config.whole("num_attention_heads")
    heads, width = Heads(num, num, config.whole("kv_channels")), config.whole("intermediate_size") // 2
    size, bias = heads.num * heads.dim, not config.flag("no_bias")
    return uniform_facts(
        config,
        heads,
        attention=(LinearFacts("c_attn", hidden, 3 * size, True), LinearFacts("c_proj", size, hidden, bias)),
        mlp=(
            LinearFacts("w1", hidden, width, bias),
            LinearFacts("w2", hidden, width, bias),
            LinearFacts("c_proj", width, hidden, bias),
        ),
        norm_params=2 * hidden,
        final_norm_params=hidden,
        gated_mlp=True,
        norm="rms",
        activation="silu",
        rotary_dims=int(heads.dim * config.fraction("rotary_pct")),
        max_positions=config.whole_or_none("seq_length") or config.whole("max_position_embeddings"),
        attention_dropout=config.largest("attn_dropout_prob"),
        embedding_name="wte",
        **named,
    )


FAMILIES: dict[str, Callable[..., ModelFacts]] = {
    "gpt2": _gpt2,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": bloom_facts,
    "falcon": falcon_facts,
    "phi": _phi,
    "qwen": _qwen,
}
