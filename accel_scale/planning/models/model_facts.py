"""What the planner knows about a causal language model: shapes, never weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

# Layouts and activation functions that are modelled by hand.
MODELLED_VARIANTS = ("", "grouped", "halves", "unscaled")
MODELLED_ACTIVATIONS = ("relu", "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class LinearFacts:
    """One matrix product of a layer.

    Attributes:
        name: Its last module name in the transformers class, e.g. ``q_proj``; experts are stacked.
        in_features: Columns.
        out_features: Rows.
        bias: Whether it adds a bias.
        copies: Number of such matrices in the layer (experts); 1 otherwise.
        active_copies: Number of them that a token passes through.
        quantisable: Whether a 4-bit load replaces it (`nn.Linear` modules; experts kept as one 3-D tensor are not).
        lora_names: Names by which PEFT targets it, if not by `name`: experts kept as one tensor are targeted by the
            names they had as modules, all of them together, at rank r each. Empty: PEFT cannot adapt it.
        written_out: Whether the class multiplies by the transposed weight and adds the bias itself (Falcon).
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    copies: int = 1
    active_copies: int = 1
    quantisable: bool = True
    lora_names: tuple[str, ...] | None = None
    written_out: bool = False

    @property
    def num_params(self) -> int:
        """Weights and biases of all copies."""
        return self.copies * (self.in_features * self.out_features + self.out_features * self.bias)


@dataclass(frozen=True)
class MixtureFacts:
    """The experts of a mixture-of-experts layer.

    Attributes:
        num_experts: Routed experts.
        experts_per_token: Routed experts each token passes through.
        expert_intermediate_size: Width of one expert.
        shared_intermediate_size: Width of the expert that every token passes through; 0 without one.
    """

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int = 0


@dataclass(frozen=True)
class LayerFacts:
    """One kind of decoder layer.

    Attributes:
        count: Number of such layers in the model.
        attention: The attention's linears, ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (or the fused names).
        mlp: The MLP's linears (router included); gated MLPs have gate, up and down.
        norm_params: Parameters of all norms in the layer, query and key norms included.
        num_norms: Norms over the hidden size that run in the layer: 2, 4 (Gemma 2, 3) or 1 (parallel blocks).
        query_key_norm: Whether queries and keys are normalised per head.
        sliding_window: Number of tokens that attention looks back; `None` for all.
        mixture: The experts; `None` in a dense layer.
        rotates: Whether its queries and keys get rotary embeddings, if the model has them.
        other_params: Parameters that belong to neither a matrix product nor a norm.
        position_share: Positions that the layer computes, as a share of the row's: less than 1 if it runs on patches
            of several bytes (BLT).
    """

    count: int
    attention: tuple[LinearFacts, ...]
    mlp: tuple[LinearFacts, ...]
    norm_params: int
    num_norms: int = 2
    query_key_norm: bool = False
    sliding_window: int | None = None
    mixture: MixtureFacts | None = None
    rotates: bool = True
    other_params: int = 0
    position_share: float = 1.0

    @property
    def linears(self) -> tuple[LinearFacts, ...]:
        """Every matrix product of the layer."""
        return (*self.attention, *self.mlp)

    @property
    def num_params(self) -> int:
        """Parameters of one such layer."""
        return sum(linear.num_params for linear in self.linears) + self.norm_params + self.other_params


@dataclass(frozen=True)
class ModelFacts:
    """A decoder-only language model.

    Attributes:
        name: The name that the user gave.
        model_type: transformers' name for the architecture.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate_size: Width of a dense MLP.
        vocab_size: Rows of the embedding.
        tied_embeddings: Whether the head shares the embedding's weight.
        gated_mlp: Whether the MLP multiplies two projections (SwiGLU, GeGLU).
        activation: transformers' name for the activation function.
        norm: ``rms`` or ``layer``.
        parallel_residual: Whether attention and MLP are added to the same residual: parallel blocks, and those that
            normalise it once for each (GPT-NeoX, Falcon 40B).
        rotary_dims: Dimensions of a head that get rotary embeddings; 0 with learned positions.
        position_params: Parameters of learned positions.
        final_norm_params: Parameters of the norm before the head.
        head_bias: Whether the head adds a bias.
        max_positions: Longest sequence that the model was made for.
        attention_dropout: Probability with which attention weights are dropped in training.
        embedding_dropout: The same for the embedding's output.
        residual_dropout: The same for the outputs of attention and MLP.
        logit_softcap: Whether final logits pass a tanh cap (Gemma 2).
        attention_softcap: Whether attention scores pass one.
        projection_clip: Whether queries, keys and values are clamped as they leave their projections (OLMo 1.7).
        layer_variant: The layout of its layers within the family, if shapes do not tell; empty: the usual one. Layouts
            that are not in `MODELLED_VARIANTS` are traced.
        value_dim: Width of a head's values, if not `head_dim` (latent attention); otherwise 0.
        embedding_size: Width of the embedding and the head, if not `hidden_size` (OPT-350M); otherwise 0.
        embedding_name: Last module name of the embedding.
        outside_linears: Matrix products outside the layers, except the head.
        outside_other_params: Parameters outside the layers that belong to none of the above: the norm next to the
            embedding (BLOOM).
        frozen_params: Parameters outside the layers that training on text leaves frozen, such as a vision tower's.
        has_embedding: Whether the token embedding is included; later stages of a pipeline lack it.
        has_head: Whether the head is included; earlier stages lack it.
        buffer_bytes: Bytes of buffers with a dtype of their own (masks, tables of positions).
        buffer_values: Number of values in buffers with the dtype of the weights.
        num_scores: Outputs of a head that scores rows, as in a reward model; 0: the head predicts tokens.
        traced_config: The text of config.json for a model whose layers are traced rather than modelled by hand; empty
            for others.
        layers: The kinds of layers, in order of first appearance.
    """

    name: str
    model_type: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    gated_mlp: bool
    activation: str
    norm: str
    layers: tuple[LayerFacts, ...]
    rotary_dims: int = 0
    position_params: int = 0
    final_norm_params: int = 0
    head_bias: bool = False
    max_positions: int = 0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    logit_softcap: bool = False
    attention_softcap: bool = False
    parallel_residual: bool = False
    projection_clip: bool = False
    layer_variant: str = ""
    value_dim: int = 0
    embedding_size: int = 0
    embedding_name: str = "embed_tokens"
    outside_linears: tuple[LinearFacts, ...] = ()
    outside_other_params: int = 0
    frozen_params: int = 0
    has_embedding: bool = True
    has_head: bool = True
    buffer_bytes: int = 0
    buffer_values: int = 0
    num_scores: int = 0
    traced_config: str = ""

    @property
    def layers_are_modelled(self) -> bool:
        """False for a variant within a family that only its class describes, and which is traced."""
        return self.layer_variant in MODELLED_VARIANTS and self.activation in MODELLED_ACTIVATIONS

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding (also the head's, if tied)."""
        return self.vocab_size * (self.embedding_size or self.hidden_size)

    @property
    def head_params(self) -> int:
        """Parameters that the head adds: no weight of its own if tied."""
        if not self.has_head:
            return 0
        if self.num_scores:
            return self.head_weights
        return (0 if self.tied_embeddings else self.embedding_params) + self.vocab_size * self.head_bias

    @property
    def head_width(self) -> int:
        """Outputs of the head per token: a logit for each entry of the vocabulary, or scores."""
        return self.num_scores or self.vocab_size

    @property
    def head_weights(self) -> int:
        """Weights that the head multiplies by, whether tied or its own."""
        return self.num_scores * self.hidden_size or self.embedding_params

    @property
    def outside_params(self) -> int:
        """Parameters outside the layers that are not embedding, positions, final norm or head."""
        return sum(linear.num_params for linear in self.outside_linears) + self.outside_other_params

    @property
    def layer_params(self) -> int:
        """Parameters of all decoder layers."""
        return sum(layer.count * layer.num_params for layer in self.layers)

    @property
    def num_params(self) -> int:
        """All parameters, tied ones counted once: the result of ``model.num_parameters()``."""
        outside = self.position_params + self.final_norm_params + self.head_params
        outside += self.embedding_params if self.has_embedding else 0
        return outside + self.outside_params + self.layer_params

    @property
    def num_active_params(self) -> int:
        """Parameters of the matrix products a token passes through: layers and head, without the embedding look-up."""
        linears = [(linear, layer.count) for layer in self.layers for linear in layer.linears]
        linears += [(linear, 1) for linear in self.outside_linears]
        return self.head_weights + sum(
            count * linear.num_params // linear.copies * linear.active_copies for linear, count in linears
        )

    def as_reward_model(self) -> ModelFacts:
        """The same layers with a head of one score."""
        return replace(self, num_scores=1, tied_embeddings=False, head_bias=False, logit_softcap=False)

    def each_layer(self) -> Iterator[LayerFacts]:
        """Yield every layer, one by one."""
        for layer in self.layers:
            for _ in range(layer.count):
                yield layer
