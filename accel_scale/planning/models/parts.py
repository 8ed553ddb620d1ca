"""Shared helpers for the facts of families before Llama."""

from __future__ import annotations

from typing import Any

from accel_scale.planning.models.config_fields import ConfigFields
from accel_scale.planning.models.families import Heads
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, ModelFacts


def uniform_facts(
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
    """Facts of a model with identical layers; LayerNorms with bias and an ungated MLP unless `others` differ."""
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


def two_layers(config: ConfigFields, names: tuple[str, str], *, bias: bool = True) -> tuple[LinearFacts, ...]:
    """An ungated MLP, 4 hidden sizes wide unless the config gives its width."""
    hidden = config.whole("hidden_size")
    width = config.whole_or_none("intermediate_size") or 4 * hidden
    return (LinearFacts(names[0], hidden, width, bias), LinearFacts(names[1], width, hidden, bias))


def whole_attention(
    config: ConfigFields, names: tuple[str, ...], *, bias: bool, out_bias: bool | None = None
) -> tuple[LinearFacts, ...]:
    """Projections without grouped queries: all of `names` but the last read the hidden state."""
    hidden, last_bias = config.whole("hidden_size"), bias if out_bias is None else out_bias
    size = 3 * hidden if len(names) == 2 else hidden
    inputs = (LinearFacts(name, hidden, size, bias) for name in names[:-1])
    return (*inputs, LinearFacts(names[-1], hidden, hidden, last_bias))
