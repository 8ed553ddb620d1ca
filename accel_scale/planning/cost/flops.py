"""FLOPs of a training step: exact matrix products and attention, by method and checkpointing policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import POLICY_CHOICES, SEGMENTS, kind_of, number_in
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, ModelFacts
from accel_scale.planning.models.parameters import adapter_rank, parameter_groups
from accel_scale.planning.models.training_setup import TrainingSetup


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one position, by operation; a multiply-add counts as two.

    Attributes:
        linears: Forward products with the matrices in and outside the layers, except the head.
        attention: Forward scores and weighted values.
        head: Forward product with the head.
        adapters: Forward products with LoRA's A and B.
        backward: Backward pass of all of the above.
        recompute: Forward products that activation checkpointing repeats.
    """

    linears: float
    attention: float
    head: float
    adapters: float
    backward: float
    recompute: float

    @property
    def forward(self) -> float:
        """FLOPs of one forward pass."""
        return self.linears + self.attention + self.head + self.adapters

    @property
    def total(self) -> float:
        """FLOPs of forward, backward and recomputation."""
        return self.forward + self.backward + self.recompute


def hardware_flops_per_token(
    facts: ModelFacts, setup: TrainingSetup, *, document_length: float | None = None
) -> FlopsPerToken:
    """FLOPs that the GPU actually executes for a position (HFU): k = 6 full, 8 with checkpointing, 4 LoRA, 6 with it.

    k counts FLOPs per weight: 2 forward, 2 for the gradient of inputs, 2 for that of weights if they are trained,
    2 for recomputation. Adapters are always trained; attention has no weights (2 + 4 times its products).

    Args:
        document_length: Average tokens per document, if packed rows isolate documents; `None`: the row.
    """
    executed = "full" if setup.attention == "eager" else "causal"
    layers, outside = linear_flops(facts)
    linears = layers + outside
    attention = attention_flops(facts, setup.sequence_length, scores=executed, document_length=document_length)
    head = 2.0 * facts.head_width * facts.hidden_size
    adapters = 0.0 if setup.trains_all else 2.0 * active_adapter_params(facts, setup)
    trained = setup.trains_all
    backward = (2 if trained else 1) * (linears + head) + 2 * (attention + adapters)
    # A head trained in full besides adapters also has a weight gradient.
    if not trained and "lm_head" in setup.lora.full_modules:
        backward += head
    recompute = recomputed_fraction(setup.checkpointing) * (layers + attention + adapters)
    if setup.checkpointing == "selective":
        recompute += (1 - 1 / setup.keeps_every) * layers
    return FlopsPerToken(linears, attention, head, adapters, backward, recompute)


def model_flops_per_token(facts: ModelFacts, setup: TrainingSetup, *, document_length: float | None = None) -> float:
    """FLOPs needed to train all weights on a position: 6N + 3 × attention, the numerator of MFU.

    N excludes the embedding look-up and includes the head. LoRA and QLoRA use the same k = 6 by convention, so that
    methods can be compared; they execute less, so their HFU is lower. Causal scores are counted once.
    """
    attention = attention_flops(facts, setup.sequence_length, scores="causal", document_length=document_length)
    return 3 * (sum(linear_flops(facts)) + 2.0 * facts.head_width * facts.hidden_size + attention)


def linear_flops(facts: ModelFacts) -> tuple[float, float]:
    """Forward FLOPs per token of the matrices in all layers, and of those outside them, except the head."""
    layers = sum(layer.count * active_linear_flops(layer) for layer in facts.layers)
    return layers, _products(facts.outside_linears)


def active_linear_flops(layer: LayerFacts) -> float:
    """Forward FLOPs per token of one layer's matrices: 2 × in × out × copies that a token passes through."""
    return layer.position_share * _products(layer.linears)


def _products(linears: Iterable[LinearFacts]) -> float:
    return sum(2.0 * linear.in_features * linear.out_features * linear.active_copies for linear in linears)


def attention_flops(
    facts: ModelFacts, sequence_length: int, *, scores: str = "causal", document_length: float | None = None
) -> float:
    """Forward FLOPs per token of all layers' attention: 4 × heads × head size × mean context.

    For a full square that is the 4·s·h per layer behind the usual 12·L·s·h of a training step; causal is half of it.

    Args:
        scores: ``causal``: only what the mask leaves; ``full``: the whole square, as eager attention computes.
        document_length: Mean length of isolated documents; never longer than a row.
    """
    row = float(sequence_length)
    length = min(row, document_length) if document_length else row
    width = 2.0 * facts.num_heads * (facts.head_dim + (facts.value_dim or facts.head_dim))

    def context(layer: LayerFacts) -> float:
        if scores == "full":
            return layer.position_share * row
        return mean_context(layer.position_share * length, layer.sliding_window)

    return sum(layer.count * layer.position_share * width * context(layer) for layer in facts.layers)


def mean_context(length: float, window: int | None = None) -> float:
    """Average number of tokens that a causal query sees in a document of `length`, at most `window` back: (L+1)/2."""
    if window is None or window >= length:
        return (length + 1) / 2
    return window - window * (window - 1) / (2 * length)


# Shares of a layer's products: attention has four square matrices and the MLP eight, in the usual shape.
_SUBLAYER_SHARES = {"attention": 1 / 3, "mlp": 2 / 3}


def recomputed_fraction(checkpointing: str) -> float:
    """Share of the layers' forward products that the backward pass repeats under a checkpointing policy.

    ``selective`` keeps the outputs of matrix products and attention, so it repeats none of them.

    Raises:
        ConfigError: if it is not a policy.
    """
    kind = kind_of(checkpointing)
    if kind in ("none", "selective"):
        return 0.0
    if kind in ("full", "offload", SEGMENTS):
        return 1.0
    if kind in _SUBLAYER_SHARES:
        return _SUBLAYER_SHARES[kind]
    if kind == "every_n":
        return 1 / number_in(checkpointing)[1]
    raise ConfigError(
        f"{checkpointing!r} is not a checkpointing policy.",
        place="checkpointing",
        fix=f"use {POLICY_CHOICES}.",
    )


def adapted_linears(layer: LayerFacts, setup: TrainingSetup) -> tuple[LinearFacts, ...]:
    """The matrices of a layer that get an adapter."""
    if setup.trains_all:
        return ()
    return tuple(linear for linear in layer.linears if adapter_rank(linear, setup.lora))


def active_adapter_params(facts: ModelFacts, setup: TrainingSetup) -> float:
    """Adapter weights that a token passes through: rank × (in + out) for each adapted matrix."""
    if setup.trains_all:
        return 0.0

    def params(linears: Iterable[LinearFacts]) -> float:
        return sum(
            linear.active_copies * adapter_rank(linear, setup.lora) * (linear.in_features + linear.out_features)
            for linear in linears
        )

    layers = sum(layer.count * layer.position_share * params(layer.linears) for layer in facts.layers)
    return layers + params(facts.outside_linears)


def trained_params(facts: ModelFacts, setup: TrainingSetup) -> int:
    """Parameters with a gradient: all, or adapters (with DoRA's magnitudes) and the modules trained besides them."""
    return parameter_groups(facts, setup).trainable
