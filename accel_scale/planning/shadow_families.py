"""How the layers of each architecture differ, as far as memory is concerned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_scale.errors import ConfigError
from accel_scale.planning.model_facts import ModelFacts


@dataclass(frozen=True)
class Family:
    """The order of operations in one architecture's layers, read from transformers 5.23.

    Attributes:
        block: ``sequential`` (norms before), ``both`` (norms before and after), ``after`` (norms after only),
            ``joined`` (attention and MLP are added to one residual).
        joined_order: For joined blocks, what is added first: ``branches`` or ``residual``.
        keeps_names: Whether the branches' inputs and results have names of their own, which keep them in memory.
        rms: ``llama`` (weight in the input's type), ``gemma`` (one plus the weight in fp32) or ``olmo`` (weight in
            fp32, the product cast).
        layer_norm: ``torch`` (its own), ``bare`` (its own in fp32, without weights) or ``spelt`` (in single
            operations, without a bias, and for queries and keys with weights for every head).
        projections: Of fused queries, keys and values: ``split`` (one operation), ``slices`` (three) or ``separate``.
        norms_before_heads: Whether queries and keys are normalised as they leave the projections, all heads at once.
        scales_query: Whether the query is scaled by itself (OPT).
        scales_residual: Whether each branch is multiplied by a number (Granite).
        embedding_scale: ``no``, ``cast`` (a number) or ``tensor``: what the embedding is multiplied by.
        scales_logits: Whether logits are divided by a number.
        rotation: ``whole``, ``partial`` (turned parts are joined with the rest), ``inline`` (each as soon as it is
            turned), ``interleaved`` (partial, by tables that each layer makes for pairs of neighbours) or ``none``.
        rotation_type: ``input``: in the types that queries and tables come in; ``tables``: tables are in fp32 and the
            result is cast back; ``fp32``: queries and keys are cast before and back after.
        eager_fp32: Whether eager attention's softmax is in fp32.
        passes_mask: Whether layers take the mask by position, so that checkpoints move it to the host too.
        makes_both_masks: Whether a mask with and one without a window are made, whatever the layers use.
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
    makes_both_masks: bool = False
    passes_mask: bool = False


_LLAMA = Family()
_GEMMA = Family(rms="gemma", embedding_scale="tensor")
_OLMO2 = Family(block="after", rms="olmo", norms_before_heads=True, rotation_type="tables")

_COHERE = Family(block="joined", joined_order="residual", layer_norm="spelt", rotation_type="fp32", scales_logits=True)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    # The first Qwen brought its own code; its layers are Llama's with one fused projection.
    "qwen": replace(_LLAMA, projections="split"),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2_moe": Family(makes_both_masks=True),
    "qwen3_moe": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, block="both"),
    "gemma3_text": replace(_GEMMA, block="both"),
    "glm": Family(rotation="interleaved"),
    "glm4": Family(block="both", rotation="interleaved"),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, makes_both_masks=True),
    "granite": Family(scales_residual=True, embedding_scale="cast", scales_logits=True),
    "smollm3": _LLAMA,
    "olmo": Family(layer_norm="bare", rotation_type="tables"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "starcoder2": _LLAMA,
    "phi3": Family(projections="slices", rotation="inline"),
    "phi": Family(block="joined", keeps_names=True, rotation="partial"),
    "gpt2": Family(passes_mask=True, projections="split", keeps_names=True, rotation="none", eager_fp32=False),
    "gpt_neox": Family(block="joined", projections="split", keeps_names=True, rotation="partial"),
    "stablelm": Family(block="joined", joined_order="residual", keeps_names=True, rotation="partial"),
    "opt": Family(rotation="none", scales_query=True),
}


def family_of(model: ModelFacts) -> Family:
    """The family of a model.

    Raises:
        ConfigError: for an architecture, or a variant of one, whose layers are not modelled.
    """
    family = FAMILIES.get(model.model_type)
    if family is None:
        raise _refuse(model, f"the layers of {model.model_type!r} models are not modelled")
    if model.model_type == "stablelm" and any(layer.query_key_norm for layer in model.layers):
        raise _refuse(model, "StableLM with a norm for each head is not modelled")
    if model.model_type == "opt" and (model.embedding_size or not model.final_norm_params):
        raise _refuse(model, "OPT with norms after its blocks is not modelled")
    if family.block == "joined" and not model.parallel_residual:
        family = replace(family, block="sequential")
    return family


def _refuse(model: ModelFacts, problem: str) -> ConfigError:
    return ConfigError(
        f"{model.name}: {problem}, so its activation memory is unknown.",
        place="model",
        fix=f"use one of {', '.join(sorted(FAMILIES))}.",
    )
