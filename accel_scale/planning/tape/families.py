"""How the layers of each architecture differ in their use of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import NOT_REENTRANT, SUBLAYERS, kind_of
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.styles import STYLES
from accel_scale.planning.models.training_setup import ATTENTIONS, TrainingSetup


@dataclass(frozen=True)
class Family:
    """The order of operations in one architecture's layers, read from transformers 5.23.

    Attributes:
        block: ``sequential`` (norms before), ``both`` (norms before and after), ``after`` (norms after only),
            ``joined`` (attention and MLP are added to one residual).
        joined_order: What joined blocks add first: ``branches`` or ``residual``.
        keeps_names: Whether the branches' inputs and results have names of their own, which keep them in memory.
        rms: ``llama`` (weight in the input's dtype), ``gemma`` (one plus the weight in fp32) or ``olmo`` (weight in
            fp32, the product cast); ``fused`` if the setup says so.
        layer_norm: ``torch`` (torch's own), ``bare`` (torch's own in fp32, without weights) or ``spelt`` (in single
            operations, without a bias, and with weights for every head of queries and keys).
        projections: How queries, keys and values are formed: ``split`` (from a fused product in one operation),
            ``slices`` (from it in three) or ``separate``.
        norms_before_heads: Whether queries and keys are normalised right after the projections, all heads at once.
        scales_query: Whether the query is scaled separately (OPT).
        scales_residual: Whether each branch is multiplied by a number (Granite).
        embedding_scale: What the embedding is multiplied by: ``no`` (nothing), ``cast`` (a number) or ``tensor``.
        scales_logits: Whether logits are divided by a number.
        rotation: ``whole``, ``partial`` (rotated parts are joined with the rest), ``inline`` (each right after it is
            rotated), ``interleaved`` (partial, with tables that each layer makes for pairs of neighbours), ``halves``
            (two products of halves and tables of half a head, joined) or ``none``.
        rotation_type: ``input``: in the dtypes of queries and tables; ``tables``: tables are in fp32 and the result is
            cast back; ``fp32``: queries and keys are cast before and cast back after.
        eager_fp32: Whether eager attention's softmax is in fp32.
        passes_mask: Whether layers take the mask by position, so that checkpoints move it to the host too.
        attention: ``interface`` (transformers' attention interface), or the family with its own code.
        sinks: Whether each head has one more score without a value (gpt-oss).
        embedding_norm: Whether the embedding's output is normalised (BLOOM).
        returns_weights: Whether layers return attention weights, which live until the next layer has returned.
        always_masks: Whether sdpa gets a mask even if all rows are full.
        kernels: The attention implementations it has.
        packs: Those that keep packed documents apart.
        changes_products: Whether it changes results of matrix products in place, which selective checkpointing keeps.
        has_mlp: Whether the MLP is a module with one input, which can be computed in tiles.
        makes_both_masks: Whether masks with and without a window are made, whatever the layers use.
    """

    block: str = "sequential"
    joined_order: str = "branches"
    keeps_names: bool = False
    rms: str = "llama"
    layer_norm: str = "torch"
    projections: str = "separate"
    norms_before_heads: bool = False
    scales_query: bool = False
    scales_residual: bool = False
    embedding_scale: str = "no"
    scales_logits: bool = False
    rotation: str = "whole"
    rotation_type: str = "input"
    eager_fp32: bool = True
    attention: str = "interface"
    sinks: bool = False
    embedding_norm: bool = False
    returns_weights: bool = False
    always_masks: bool = False
    kernels: tuple[str, ...] = ATTENTIONS
    packs: tuple[str, ...] = ATTENTIONS
    changes_products: bool = False
    makes_both_masks: bool = False
    has_mlp: bool = True
    passes_mask: bool = False


_LLAMA = Family()
_GEMMA = Family(rms="gemma", embedding_scale="tensor")
_OLMO2 = Family(block="after", rms="olmo", norms_before_heads=True, rotation_type="tables")

_COHERE = Family(block="joined", joined_order="residual", layer_norm="spelt", rotation_type="fp32", scales_logits=True)

# From `STYLES`, only those whose layers compute differently from Llama's.
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    # The first Qwen brought its own code; its layers are Llama's with one fused projection.
    "qwen": replace(_LLAMA, projections="split"),
    "qwen2_moe": Family(makes_both_masks=True),
    "deepseek_v2": Family(attention="latent", rotation="none", rotation_type="tables"),
    "deepseek_v3": Family(attention="latent", rotation="none"),
    "gpt_oss": Family(
        rms="olmo",
        rotation="halves",
        makes_both_masks=True,
        sinks=True,
        kernels=("eager",),
        packs=(),
        changes_products=True,
    ),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, block="both"),
    "gemma3_text": replace(_GEMMA, block="both"),
    "glm": Family(rotation="interleaved"),
    "glm4": Family(block="both", rotation="interleaved"),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, makes_both_masks=True),
    "granite": Family(scales_residual=True, embedding_scale="cast", scales_logits=True),
    "olmo": Family(layer_norm="bare", rotation_type="tables"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi3": Family(projections="slices", rotation="inline"),
    "phi": Family(block="joined", keeps_names=True, rotation="partial"),
    "gpt2": Family(passes_mask=True, projections="split", keeps_names=True, rotation="none", eager_fp32=False),
    "gpt_neox": Family(block="joined", projections="split", keeps_names=True, rotation="partial"),
    "stablelm": Family(block="joined", joined_order="residual", keeps_names=True, rotation="partial"),
    "opt": Family(rotation="none", scales_query=True, has_mlp=False),
    "falcon": Family(
        block="falcon",
        attention="falcon",
        returns_weights=True,
        always_masks=True,
        kernels=("eager", "sdpa", "flash_attention_2"),
        packs=("flash_attention_2",),
    ),
    "gptj": Family(
        block="joined",
        attention="gptj",
        returns_weights=True,
        kernels=("eager", "flash_attention_2"),
        packs=("eager",),
    ),
    "bloom": Family(
        block="bloom",
        attention="bloom",
        rotation="none",
        embedding_norm=True,
        returns_weights=True,
        kernels=("eager",),
        packs=(),
        has_mlp=False,
    ),
}


def _family(model_type: str) -> Family | None:
    style = STYLES.get(model_type)
    return FAMILIES.get(model_type) or (FAMILIES[style.layers] if style is not None else None)


def family_of(model: ModelFacts) -> Family:
    """The family of a model.

    Raises:
        ConfigError: for an architecture, or a variant of one, whose layers are not modelled.
    """
    family = _family(model.model_type)
    if family is None:
        raise _refuse(model, f"the layers of {model.model_type!r} models are not modelled")
    if not model.layers_are_modelled:
        variant = model.layer_variant or model.activation
        raise _refuse(model, f"{model.model_type} with the variant {variant!r} is not modelled")
    if family.block == "joined" and not model.parallel_residual:
        family = replace(family, block="sequential")
    return family


def lean_parts(setup: TrainingSetup) -> frozenset[str]:
    """Norms and gates that keep only their inputs: the fused ones, and all of them under torch.compile.

    A compiled layer keeps as much as one with fused norms and gates, within 4 % in fp32 and bf16, and less under
    autocast (tests/unit/test_activations.py compiles one).
    """
    return frozenset(setup.fused) | ({"RMSNorm", "SwiGLU", "GEGLU"} if setup.compile else set())


def family_under(model: ModelFacts, setup: TrainingSetup) -> Family:
    """The family's layers as the setup runs them."""
    family = family_of(model)
    return replace(family, rms="fused") if "RMSNorm" in lean_parts(setup) else family


def has_kernel(model: ModelFacts, attention: str) -> bool:
    """True if the model's layers can run with the given attention implementation."""
    family = _family(model.model_type) or _LLAMA
    if attention == "sdpa" and model.attention_softcap:
        return False
    is_alibi = model.model_type == "falcon" and not model.rotary_dims
    return attention in family.kernels and not (is_alibi and attention.startswith("flash"))


def changes_products(model: ModelFacts) -> bool:
    """True if the model changes results of matrix products in place."""
    return (_family(model.model_type) or _LLAMA).changes_products


def tiles_conflict(model: ModelFacts, setup: TrainingSetup) -> str | None:
    """Why the model's MLPs cannot be computed in tiles, if the setup asks for that; None if they can."""
    if not setup.long_rows:
        return None
    if not (_family(model.model_type) or _LLAMA).has_mlp:
        return f"the layers of {model.name} have no MLP that can be computed in tiles"
    if kind_of(setup.checkpointing) in NOT_REENTRANT:
        return f"{setup.checkpointing} checkpointing keeps what tiles are there to drop"
    return "fp8 scales a product by all of its tokens" if setup.precision == "fp8" else None


def check_setup(model: ModelFacts, setup: TrainingSetup) -> None:
    """Refuse settings that the model's own code does not support.

    Raises:
        ConfigError: for an attention implementation, packed rows or a checkpointing policy that it cannot run.
    """
    if setup.attention == "sdpa" and model.attention_softcap:
        raise ConfigError(
            f"{model.name} caps its attention scores, which sdpa cannot.",
            place="attention",
            fix="use eager, flash_attention_2 or flex_attention.",
        )
    if not has_kernel(model, setup.attention):
        kernels = [name for name in ATTENTIONS if has_kernel(model, name)]
        raise ConfigError(
            f"{model.name} has no {setup.attention} attention.", place="attention", fix=f"use {' or '.join(kernels)}."
        )
    if setup.packing and setup.attention not in family_of(model).packs:
        raise ConfigError(
            f"{model.name} lets packed documents see each other with {setup.attention} attention.",
            place="packing",
            fix="switch packing off with --no_packing.",
        )
    if conflict := tiles_conflict(model, setup):
        raise ConfigError(f"{conflict}.", place="long_rows", fix="leave it out, and use offload checkpointing.")
    if setup.checkpointing in SUBLAYERS and family_of(model).block not in ("sequential", "both", "after"):
        raise ConfigError(
            f"{setup.checkpointing} checkpointing of {model.name} is not modelled.",
            place="checkpointing",
            fix="use full, every_2 or selective.",
        )
    if setup.parallel.stream_ranks > 1 and family_of(model).block not in ("sequential", "both", "after"):
        raise ConfigError(
            f"hidden states of {model.name} that ranks share are not modelled.",
            place="stream_ranks",
            fix="use 1.",
        )
    if setup.checkpointing == "selective" and changes_products(model):
        raise ConfigError(
            f"{model.name} changes results in place that selective checkpointing keeps.",
            place="checkpointing",
            fix="use full.",
        )


def _refuse(model: ModelFacts, problem: str) -> ConfigError:
    return ConfigError(
        f"{model.name}: {problem}, so its activation memory is unknown.",
        place="model",
        fix=f"use one of {', '.join(sorted({*FAMILIES, *STYLES}))}.",
    )
