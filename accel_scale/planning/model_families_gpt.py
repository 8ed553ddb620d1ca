"""Facts of the families before Llama: GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon, Phi, the first Qwen, BERT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_scale.planning.config_fields import ConfigFields
from accel_scale.planning.model_facts import LayerFacts, LinearFacts, ModelFacts
from accel_scale.planning.model_families import Heads, read_heads


def _facts(
    config: ConfigFields,
    heads: Heads,
    *,
    name: str,
    model_type: str,
    attention: tuple[LinearFacts, ...],
    mlp: tuple[LinearFacts, ...],
    num_norms: int = 2,
    norm_params: int | None = None,
    **others: Any,
) -> ModelFacts:
    """Facts of a model whose layers are all alike; LayerNorms with bias and an ungated MLP unless `others` say so."""
    hidden = config.whole("hidden_size")
    layer = LayerFacts(
        count=config.whole("num_hidden_layers"),
        attention=attention,
        mlp=mlp,
        norm_params=num_norms * 2 * hidden if norm_params is None else norm_params,
        num_norms=num_norms,
        query_key_norm=others.pop("query_key_norm", False),
    )
    stated: dict[str, Any] = {
        "gated_mlp": False,
        "norm": "layer",
        "final_norm_params": 2 * hidden,
        "max_positions": config.whole("max_position_embeddings"),
        "intermediate_size": mlp[0].out_features,
        "tied_embeddings": config.flag("tie_word_embeddings"),
    }
    return ModelFacts(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        num_heads=heads.num,
        num_kv_heads=heads.num_kv,
        head_dim=heads.dim,
        vocab_size=config.whole("vocab_size"),
        layers=(layer,),
        **{**stated, **others},
    )


def _two_layers(config: ConfigFields, names: tuple[str, str], *, bias: bool = True) -> tuple[LinearFacts, ...]:
    """An ungated MLP; 4 hidden sizes wide where the config does not say."""
    hidden = config.whole("hidden_size")
    width = config.whole_or_none("intermediate_size") or 4 * hidden
    return (LinearFacts(names[0], hidden, width, bias), LinearFacts(names[1], width, hidden, bias))


def _attention(
    config: ConfigFields, names: tuple[str, ...], *, bias: bool, out_bias: bool | None = None
) -> tuple[LinearFacts, ...]:
    """Projections without grouped queries: all of `names` but the last read the hidden state."""
    hidden, last_bias = config.whole("hidden_size"), bias if out_bias is None else out_bias
    size = 3 * hidden if len(names) == 2 else hidden
    inputs = (LinearFacts(name, hidden, size, bias) for name in names[:-1])
    return (*inputs, LinearFacts(names[-1], hidden, hidden, last_bias))


def _gpt2(config: ConfigFields, **named: Any) -> ModelFacts:
    positions = config.whole("max_position_embeddings")
    return _facts(
        config,
        read_heads(config, head_dim=False),
        attention=_attention(config, ("c_attn", "c_proj"), bias=True),
        mlp=_two_layers(config, ("c_fc", "c_proj")),
        activation=config.text("activation_function"),
        position_params=positions * config.whole("hidden_size"),
        attention_dropout=config.largest("attn_pdrop"),
        embedding_dropout=config.largest("embd_pdrop"),
        residual_dropout=config.largest("resid_pdrop"),
        embedding_name="wte",
        **named,
    )


def _gptj(config: ConfigFields, **named: Any) -> ModelFacts:
    heads = read_heads(config, head_dim=False)
    return _facts(
        config,
        heads,
        attention=_attention(config, ("q_proj", "k_proj", "v_proj", "out_proj"), bias=False),
        mlp=_two_layers(config, ("fc_in", "fc_out")),
        num_norms=1,
        activation=config.text("activation_function"),
        parallel_block=True,
        parallel_residual=True,
        rotary_dims=config.whole_or_none("rotary_dim") or heads.dim,
        head_bias=True,
        attention_dropout=config.largest("attn_pdrop"),
        residual_dropout=config.largest("resid_pdrop"),
        embedding_name="wte",
        **named,
    )


def _gpt_neox(config: ConfigFields, **named: Any) -> ModelFacts:
    heads = read_heads(config, head_dim=False)
    return _facts(
        config,
        heads,
        attention=_attention(config, ("query_key_value", "dense"), bias=config.flag("attention_bias")),
        mlp=_two_layers(config, ("dense_h_to_4h", "dense_4h_to_h")),
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
    return _facts(
        config,
        read_heads(config, head_dim=False),
        attention=_attention(config, ("q_proj", "k_proj", "v_proj", "out_proj"), bias=bias),
        mlp=_two_layers(config, ("fc1", "fc2"), bias=bias),
        norm_params=2 * norm_weights * hidden,
        final_norm_params=norm_weights * hidden if final_norm else 0,
        activation=config.text("activation_function"),
        # The class leaves two rows free before position 0.
        position_params=(config.whole("max_position_embeddings") + 2) * hidden,
        attention_dropout=config.largest("attention_dropout"),
        residual_dropout=config.largest("dropout"),
        embedding_size=0 if embedding == hidden else embedding,
        outside_linears=() if embedding == hidden else projections,
        **named,
    )


def _bloom(config: ConfigFields, **named: Any) -> ModelFacts:
    return _facts(
        config,
        read_heads(config, head_dim=False),
        attention=_attention(config, ("query_key_value", "dense"), bias=True),
        mlp=_two_layers(config, ("dense_h_to_4h", "dense_4h_to_h")),
        activation="gelu_pytorch_tanh",
        max_positions=config.whole_or_none("seq_length") or config.whole("max_position_embeddings"),
        attention_dropout=config.largest("attention_dropout"),
        residual_dropout=config.largest("hidden_dropout"),
        outside_other_params=2 * config.whole("hidden_size"),
        embedding_name="word_embeddings",
        **named,
    )


def _falcon_heads(config: ConfigFields) -> Heads:
    heads = read_heads(config, head_dim=False)
    if config.flag("new_decoder_architecture"):
        num_kv = config.whole_or_none("num_kv_heads") or heads.num
        if heads.num % num_kv:
            raise config.error("num_kv_heads", f"a divisor of num_attention_heads {heads.num}")
        return Heads(heads.num, num_kv, heads.dim)
    return Heads(heads.num, 1 if config.flag("multi_query") else heads.num, heads.dim)


def _falcon(config: ConfigFields, **named: Any) -> ModelFacts:
    hidden, heads, bias = config.whole("hidden_size"), _falcon_heads(config), config.flag("bias")
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    parallel_norms = config.whole_or_none("num_ln_in_parallel_attn") or (2 if new else 1)
    num_norms = (2 if parallel_norms == 2 else 1) if parallel else 2
    # FalconLinear is a subclass of nn.Linear: transformers 5 quantises nn.Linear itself only, so 4-bit loads skip it.
    width = config.whole_or_none("intermediate_size") or 4 * hidden
    sizes = {
        "query_key_value": (hidden, (heads.num + 2 * heads.num_kv) * heads.dim),
        "dense": (hidden, hidden),
        "dense_h_to_4h": (hidden, width),
        "dense_4h_to_h": (width, hidden),
    }
    linears = tuple(LinearFacts(name, *size, bias, quantisable=False) for name, size in sizes.items())
    return _facts(
        config,
        heads,
        attention=linears[:2],
        mlp=linears[2:],
        num_norms=num_norms,
        activation=config.text("activation"),
        parallel_block=parallel and num_norms == 1,
        parallel_residual=parallel,
        rotary_dims=0 if config.flag("alibi") else heads.dim,
        attention_dropout=config.largest("attention_dropout"),
        residual_dropout=config.largest("hidden_dropout"),
        embedding_name="word_embeddings",
        **named,
    )


def _phi(config: ConfigFields, **named: Any) -> ModelFacts:
    hidden, heads = config.whole("hidden_size"), read_heads(config)
    queries, keys = heads.num * heads.dim, heads.num_kv * heads.dim
    projections = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    query_key_norm = config.flag("qk_layernorm")
    return _facts(
        config,
        heads,
        attention=(
            *(LinearFacts(item, hidden, size, True) for item, size in projections),
            LinearFacts("dense", queries, hidden, True),
        ),
        mlp=_two_layers(config, ("fc1", "fc2")),
        num_norms=1,
        norm_params=2 * hidden + (4 * (hidden // heads.num) if query_key_norm else 0),
        query_key_norm=query_key_norm,
        activation=config.text("hidden_act"),
        parallel_block=True,
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
    return _facts(
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


def _bert(config: ConfigFields, **named: Any) -> ModelFacts:
    """BERT as a masked language model: the head is a dense layer, a norm and the tied embedding with a bias."""
    hidden = config.whole("hidden_size")
    return _facts(
        config,
        read_heads(config, head_dim=False),
        attention=_attention(config, ("query", "key", "value", "dense"), bias=True),
        mlp=_two_layers(config, ("dense", "dense")),
        activation=config.text("hidden_act"),
        position_params=(config.whole("max_position_embeddings") + config.whole("type_vocab_size")) * hidden,
        final_norm_params=2 * hidden,
        head_bias=True,
        attention_dropout=config.largest("attention_probs_dropout_prob"),
        residual_dropout=config.largest("hidden_dropout_prob"),
        outside_linears=(LinearFacts("dense", hidden, hidden, True),),
        # The class keeps the head's bias twice where it does not tie them.
        outside_other_params=2 * hidden + (0 if config.flag("tie_word_embeddings") else config.whole("vocab_size")),
        embedding_name="word_embeddings",
        **named,
    )


FAMILIES: dict[str, Callable[..., ModelFacts]] = {
    "gpt2": _gpt2,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "phi": _phi,
    "qwen": _qwen,
    "bert": _bert,
}
