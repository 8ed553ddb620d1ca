"""transformers' decoder layers on the tape."""

from __future__ import annotations

from collections.abc import Callable

from accel_scale.planning.models.model_facts import LayerFacts, ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.attention import Attention
from accel_scale.planning.tape.experts import mixture
from accel_scale.planning.tape.families import Family, lean_parts
from accel_scale.planning.tape.gpt_attention import BloomAttention, FalconAttention, GptjAttention
from accel_scale.planning.tape.latent import LatentAttention
from accel_scale.planning.tape.linears import Weights, linear
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.parallel import gathered
from accel_scale.planning.tape.tables import Tables
from accel_scale.planning.tape.tensors import Tensor
from accel_scale.planning.tape.tiles import tiled, tiled_norm

# Activation functions that transformers writes out as torch operations.
_WRITTEN_OUT = ("gelu_new", "gelu_fast")

_ATTENTIONS: dict[str, type[Attention]] = {
    "interface": Attention,
    "falcon": FalconAttention,
    "gptj": GptjAttention,
    "bloom": BloomAttention,
    "latent": LatentAttention,
}


class Layer:
    """One decoder layer: call it with the hidden states."""

    def __init__(
        self, ops: Ops, model: ModelFacts, facts: LayerFacts, family: Family, setup: TrainingSetup,
        weights: Weights, tables: Tables,
    ) -> None:  # fmt: skip
        self.ops, self.model, self.facts, self.family = ops, model, facts, family
        self.setup, self.weights = setup, weights
        self.attention = _ATTENTIONS[family.attention](ops, model, facts, family, setup, weights, tables)
        # If a caller puts a list here, it is filled with the attention weights.
        self.returned: list[Tensor] | None = None
        self.rows = self.attention.rows

    def __call__(self, x: Tensor) -> Tensor:
        try:
            return self._run(x)
        finally:
            if self.returned is not None and self.attention.kept is not None:
                self.returned.append(self.attention.kept)
            self.attention.kept = None

    def _run(self, x: Tensor) -> Tensor:
        if self.family.block == "joined":
            return self._joined(x)
        if self.family.block == "falcon":
            return self._falcon(x)
        if self.family.block == "bloom":
            return self._bloom(x)
        if self.family.keeps_names:
            return self._sequential_keeping_names(x)
        residual = x
        if self.family.block != "after":
            x = self._norm("input_norm", x)
        x = self._dropped(self._part("attention", self.attention, x))
        if self.family.block != "sequential":
            x = self._norm("post_attention_norm", x)
        x = self._add(residual, x)
        residual = x
        if self.family.block != "after":
            x = self._norm("mlp_norm", x)
        x = self._dropped(self._part("mlp", self.mlp, x))
        if self.family.block != "sequential":
            x = self._norm("post_mlp_norm", x)
        return self._add(residual, x)

    def _part(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Attention or MLP, recomputed in the backward pass if the policy has its name."""
        ranks = self.setup.parallel.stream_ranks

        def run() -> Tensor:
            return gathered(self.ops, function(gathered(self.ops, x, ranks)), 1 / ranks)

        return self.ops.tape.checkpoint(run, [x]) if self.setup.checkpointing == name else run()

    def _sequential_keeping_names(self, x: Tensor) -> Tensor:
        """A sequential block whose branches' results have names, which keep them alive until the layer returns."""
        residual = x
        x = self._norm("input_norm", x)
        attention = self._dropped(self._part("attention", self.attention, x))
        x = self.ops.add(attention, residual)
        residual = x
        x = self._norm("mlp_norm", x)
        mlp = self._dropped(self._part("mlp", self.mlp, x))
        return self.ops.add(residual, mlp)

    def _joined(self, x: Tensor) -> Tensor:
        residual = x
        x = self._norm("input_norm", x)
        attention = self._dropped(self.attention(x))
        if self.facts.num_norms > 1:
            del x
            mlp = self._dropped(self.mlp(self._norm("mlp_norm", residual)))
        else:
            mlp = self._dropped(self.mlp(x))
        first = residual if self.family.joined_order == "residual" else mlp
        last = mlp if self.family.joined_order == "residual" else residual
        return self.ops.add(self.ops.add(first, attention), last)

    def _falcon(self, x: Tensor) -> Tensor:
        residual = x
        x = self._norm("input_norm", x)
        is_parallel = self.model.parallel_residual
        mlp_input = self._norm("mlp_norm", residual) if is_parallel and self.facts.num_norms > 1 else x
        attention = self.attention(x)
        if not is_parallel:
            dropped = self.ops.dropout(attention) if self.model.attention_dropout else attention
            residual = self.ops.add(residual, dropped)
            del dropped
            mlp_input = self._norm("mlp_norm", residual)
        mlp = self.mlp(mlp_input)
        if is_parallel:
            mlp = self.ops.add_in_place(mlp, attention)
        return self.ops.add(residual, self._dropped(mlp))

    def _bloom(self, x: Tensor) -> Tensor:
        residual = x
        normed = self._norm("input_norm", x)
        del x
        assert isinstance(self.attention, BloomAttention)
        attention = self.attention(normed, residual)
        normed = self._norm("mlp_norm", attention)
        mlp = self._dropped(self.mlp(normed))
        return self.ops.add(attention, mlp)

    def _dropped(self, x: Tensor) -> Tensor:
        return self.ops.dropout(x) if self.model.residual_dropout else x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return tiled_norm(self.ops, self.model, self.family, self.weights, name, x)

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.ops.add(residual, self.ops.scale(x) if self.family.scales_residual else x)

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP, or the experts instead of it."""
        if self.facts.mixture is not None:
            return mixture(self, x)
        names = [linear.name for linear in self.facts.mlp]
        if not self.setup.long_rows:
            return self.dense_mlp(x, names)
        width = self.model.hidden_size
        return tiled(self.ops, self.weights, "mlp", x, width, width, lambda tile, own: self._with(own, tile, names))

    def _with(self, weights: Weights, x: Tensor, names: list[str]) -> Tensor:
        before, self.weights = self.weights, weights
        try:
            return self.dense_mlp(x, names)
        finally:
            self.weights = before

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The MLP's matrix product called `name`."""
        facts = next(item for item in self.facts.mlp if item.name == name and item.copies == 1)
        return linear(self.ops, self.weights, facts, x, "mlp")

    def dense_mlp(self, x: Tensor, names: list[str]) -> Tensor:
        """The MLP of the linears called `names`: two, a fused gate and two, or gate, up and down."""
        if not self.model.gated_mlp:
            inner = self.linear(names[0], x)
            inner = self.activate(inner)
            return self.linear(names[1], inner)
        if len(names) == 2:
            return self.linear(names[1], self.fused_gate(self.linear(names[0], x)))
        gate, up, down = names
        if {"SwiGLU", "GEGLU"}.intersection(lean_parts(self.setup)):
            return self.linear(down, self._fused_product(self.linear(gate, x), self.linear(up, x)))
        return self.linear(down, self.ops.mul(self.activate(self.linear(gate, x)), self.linear(up, x)))

    def _fused_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """Liger's ``activation(gate) * up``: one kernel, which keeps its inputs."""
        ops, numel, itemsize = self.ops, gate.numel, gate.itemsize

        def backward(grad: Tensor) -> list[Tensor | None]:
            return [ops.new(numel, itemsize), ops.new(numel, itemsize)]

        return ops.custom([gate, up], numel, itemsize, [gate, up], backward)

    def fused_gate(self, fused: Tensor) -> Tensor:
        """``up * activation(gate)`` on the two halves of one product."""
        gate, up = self.ops.split(fused, [fused.numel / 2] * 2)
        return self.ops.mul(up, self.activate(gate))

    def activate(self, x: Tensor) -> Tensor:
        """The activation function."""
        if self.model.model_type == "bloom":
            return _bloom_gelu(self.ops, x)
        if self.model.activation in _WRITTEN_OUT:
            return _written_out_gelu(self.ops, x)
        return self.ops.elementwise(x, saves_input=self.model.activation != "relu")


def _written_out_gelu(ops: Ops, x: Tensor) -> Tensor:
    """``0.5 * x * (1 + tanh(c * (x + 0.044715 * x³)))`` in single operations."""
    half = ops.scale(x)
    # CUDA's autocast computes powers in fp32, and what follows stays in fp32.
    is_wide = ops.tape.is_cuda and ops.tape.autocast_bytes is not None
    source = ops.cast(x, FP32) if is_wide else x
    # No intermediate result has a name.
    return ops.mul(
        half,
        ops.shift(
            ops.elementwise(
                ops.scale(ops.add(x, ops.scale(ops.elementwise(source, temporaries=2)))), saves_input=False
            )
        ),
    )


def _bloom_gelu(ops: Ops, x: Tensor) -> Tensor:
    """BLOOM's GELU: one autograd function that saves its input; up to four tensors live at once, five in backward."""
    numel, itemsize = x.numel, x.itemsize
    temporaries = [ops.new(numel, itemsize) for _ in range(4)]
    del temporaries

    def backward(grad: Tensor) -> list[Tensor | None]:
        temporaries = [ops.new(numel, itemsize) for _ in range(5)]
        del temporaries
        tanh_and_factor = [ops.new(numel, itemsize) for _ in range(2)]
        result = ops.new(numel, itemsize)
        del tanh_and_factor
        return [result]

    return ops.custom([x], numel, itemsize, [x], backward)
