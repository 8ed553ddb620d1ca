"""Mixtures of experts as transformers computes them: tokens sorted by expert, then grouped matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel_scale.planning.models.model_facts import LinearFacts
from accel_scale.planning.tape.linears import adapter_key
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tensors import Parameter, Tensor

if TYPE_CHECKING:
    from accel_scale.planning.models.model_facts import LayerFacts, ModelFacts
    from accel_scale.planning.tape.families import Family
    from accel_scale.planning.tape.linears import Weights

_INDEX_BYTES = 8


class MixtureLayer(Protocol):
    """What a mixture needs from its decoder layer."""

    ops: Ops
    model: ModelFacts
    facts: LayerFacts
    family: Family
    weights: Weights
    rows: float

    def linear(self, name: str, x: Tensor) -> Tensor:
        """One of the layer's linear modules."""

    def dense_mlp(self, x: Tensor, names: list[str]) -> Tensor:
        """A gated MLP of the linear modules with these names."""

    def activate(self, x: Tensor) -> Tensor:
        """The layer's activation function."""


def mixture(layer: MixtureLayer, x: Tensor) -> Tensor:
    """Routed experts, and the shared one if there is one, for all tokens of `x`.

    The number of tokens per expert does not matter: the sorted copies of all tokens are in one tensor.
    """
    facts = layer.facts.mixture
    assert facts is not None
    if not facts.shared_intermediate_size:
        return _experts(layer, x, _route(layer, x, facts.experts_per_token))
    if layer.family.attention == "latent":
        chosen, routing = _route_in_fp32(layer, x, facts.experts_per_token)
        routed = _experts(layer, x, routing)
        out = layer.ops.add(routed, layer.dense_mlp(x, ["gate_proj", "up_proj", "down_proj"]))
        del chosen
        return out
    names = [item.name for item in layer.facts.mlp if item.copies == 1][1:]
    shared = layer.dense_mlp(x, names[:-1])
    routing = _route(layer, x, facts.experts_per_token)
    routed = _experts(layer, x, routing)
    gate = layer.ops.elementwise(layer.linear(names[-1], x), saves_input=False)
    shared = layer.ops.mul(gate, shared)
    return layer.ops.add(routed, shared)


def _route(layer: MixtureLayer, x: Tensor, per_token: int) -> Tensor:
    """Weights of each token's experts: fp32 softmax over all experts, keeping the largest."""
    ops, rows = layer.ops, layer.rows
    chosen = rows * per_token
    gate = next(item for item in layer.facts.mlp if item.name in ("gate", "router"))
    # An adapter of the router changes its weight, as the experts' do: the router is not a separate module.
    logits = _product(ops, gate, ops.autocast(x), ops.autocast(_weight(layer, gate)))
    if gate.bias:
        return _softmax_of_top(ops, logits, chosen)
    probabilities = ops.softmax(logits)
    total = probabilities.numel
    positions = ops.new(chosen * _INDEX_BYTES, 1)

    def scatter(grad: Tensor) -> list[Tensor | None]:
        return [_written(ops, total, FP32)]

    top = ops.tape.record(ops.new(chosen, FP32), [probabilities], [positions], scatter)
    sums = ops.new(rows, FP32)
    weights = ops.tape.record(ops.new(chosen, FP32), [top], [top, sums], lambda grad: [ops.new(chosen, FP32)])
    return ops.cast(weights, FP32 if layer.model.model_type == "mixtral" else logits.itemsize)


def _route_in_fp32(layer: MixtureLayer, x: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """DeepSeek's routing: fp32 scores, softmax or sigmoid, the largest scaled. Returns (positions, weights)."""
    ops, chosen = layer.ops, layer.rows * per_token
    gate = next(item for item in layer.facts.mlp if item.name == "gate")
    weight = ops.autocast(ops.cast(_weight(layer, gate), FP32))
    logits = _product(ops, gate, ops.autocast(ops.cast(x, FP32)), weight)
    is_softmax = layer.model.model_type == "deepseek_v2"
    scores = ops.softmax(logits) if is_softmax else ops.elementwise(logits, saves_input=False)
    total, itemsize = scores.numel, scores.itemsize
    positions = ops.new(chosen * _INDEX_BYTES, 1)
    top = ops.new(chosen, itemsize)
    ops.tape.record(top, [scores], [positions], lambda grad: [_written(ops, total, itemsize)])
    if not is_softmax:
        # Divided by their sum, in place.
        sums, before = ops.new(layer.rows, itemsize), ops.new(chosen, itemsize)
        top = ops.tape.record(top.view(), [top], [sums, before], lambda grad: [ops.new(chosen, itemsize)])
    return positions, ops.scale(top)


def _softmax_of_top(ops: Ops, logits: Tensor, chosen: float) -> Tensor:
    """Softmax over only the largest logits, in their dtype (gpt-oss)."""
    total, itemsize = logits.numel, logits.itemsize
    positions = ops.new(chosen * _INDEX_BYTES, 1)
    top = ops.new(chosen, itemsize)
    ops.tape.record(top, [logits], [positions], lambda grad: [_written(ops, total, itemsize)])
    return ops.softmax(top, itemsize)


def _experts(layer: MixtureLayer, x: Tensor, routing: Tensor) -> Tensor:
    ops, facts = layer.ops, layer.facts.mixture
    assert facts is not None
    linears = {item.name: item for item in layer.facts.mlp if item.copies > 1}
    copies = layer.rows * facts.experts_per_token
    itemsize, width = x.itemsize, layer.model.hidden_size
    tokens = gathered(ops, x, copies * width, copies)
    scales = gathered(ops, routing, copies, copies)
    # With biases: the expert of each copy.
    experts = ops.new(copies * _INDEX_BYTES, 1) if linears["down_proj"].bias else None
    # The first biases live until the second ones take their name.
    inner, biases = _grouped(layer, linears["gate_up_proj"], tokens, experts)
    inner = _clamped_gate(ops, inner) if layer.model.model_type == "gpt_oss" else _gate(layer, inner)
    inner, biases = _grouped(layer, linears["down_proj"], inner, experts)  # noqa: RUF059
    weighted = ops.mul(inner, scales)
    weighted = gathered(ops, weighted, weighted.numel, copies)
    size, wide = weighted.numel, weighted.itemsize
    # The sum's gradient is expanded to every copy.
    summed = ops.custom([weighted], layer.rows * width, wide, [], lambda grad: [ops.new(size, wide)])
    return ops.cast(summed, itemsize)


def _gate(layer: MixtureLayer, inner: Tensor) -> Tensor:
    gate, up = layer.ops.split(inner, [inner.numel / 2] * 2)
    return layer.ops.mul(layer.activate(gate), up)


def _clamped_gate(ops: Ops, inner: Tensor) -> Tensor:
    """gpt-oss's gate: every second value is the gate, both halves are clamped, and 1 is added to the other half."""
    half = inner.numel / 2
    gate, up = ops.part(inner, half), ops.part(inner, half)
    gate = ops.clamped(gate)
    up = ops.clamped(up)
    glu = ops.mul(gate, ops.elementwise(ops.scale(gate), saves_input=False))
    return ops.mul(ops.shift(up), glu)


def _grouped(
    layer: MixtureLayer, facts: LinearFacts, x: Tensor, experts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A product per expert, and the biases of each copy. Autocast ignores it, so `x` is cast to the weights' dtype."""
    ops, weight, biases = layer.ops, _weight(layer, facts), None
    if experts is not None:
        parameter = layer.weights.base(f"experts.{facts.name}.bias", facts.copies * facts.out_features)
        bias, rows = _whole(parameter), x.numel / facts.in_features
        size, itemsize = bias.numel, bias.itemsize
        biases = ops.custom(
            [bias], rows * facts.out_features, itemsize, [experts], lambda grad: [_written(ops, size, itemsize)]
        )
    out = _product(ops, facts, ops.cast(x, weight.itemsize), weight)
    return (out, None) if biases is None else (ops.add_in_place(out, biases), biases)


def _product(ops: Ops, facts: LinearFacts, x: Tensor, weight: Tensor) -> Tensor:
    rows, sizes, itemsize = x.numel / facts.in_features, (x.numel, weight.numel), weight.itemsize
    wanted = (x.requires_grad, weight.requires_grad)

    def backward(grad: Tensor) -> list[Tensor | None]:
        weight_grad = ops.new(sizes[1], itemsize) if wanted[1] else None
        return [ops.new(sizes[0], itemsize) if wanted[0] else None, weight_grad]

    out = ops.tape.product(rows * facts.out_features, itemsize)
    saved = [x if wanted[1] else None, weight if wanted[0] else None]
    return ops.tape.record(out, [x, weight], saved, backward)


def _weight(layer: MixtureLayer, facts: LinearFacts) -> Tensor:
    """The stacked weights; PEFT adds an adapter's update to all of them before each use."""
    ops, weights = layer.ops, layer.weights
    size = facts.copies * facts.in_features * facts.out_features
    parameter = weights.base(f"experts.{facts.name}", size)
    base = Tensor(None, size, parameter.itemsize, parameter.node)
    if adapter_key(facts) not in weights.adapted:
        return base
    rank = weights.setup.lora.rank * len(facts.lora_names or ("",)) * facts.copies
    factors = [
        ops.cast(_whole(weights.adapter(f"experts.{facts.name}.{end}", rank * features)), base.itemsize)
        for end, features in (("B", facts.out_features), ("A", facts.in_features))
    ]
    sizes, itemsize = [factor.numel for factor in factors], base.itemsize

    def backward(grad: Tensor) -> list[Tensor | None]:
        grads: list[Tensor | None] = []
        for numel in sizes:
            product = ops.new(numel, itemsize)
            grads.append(ops.new(numel, itemsize))
            del product
        return grads

    # Computed once for its shape, once for its values.
    shape = ops.tape.product(size, itemsize)
    del shape
    return ops.tape.record(ops.tape.product(size, itemsize), factors, factors, backward)


def _whole(parameter: Parameter) -> Tensor:
    return Tensor(None, parameter.numel, parameter.itemsize, parameter.node)


def gathered(ops: Ops, x: Tensor, numel: float, indices: float) -> Tensor:
    """Rows picked by index; the gradient is written into zeros."""
    total, itemsize = x.numel, x.itemsize
    index = ops.new(indices * _INDEX_BYTES, 1)
    return ops.custom([x], numel, itemsize, [index], lambda grad: [_written(ops, total, itemsize)])


def _written(ops: Ops, numel: float, itemsize: int) -> Tensor:
    """Zeros that gradients are written into; in new memory while a tracker is active."""
    zeros = ops.new(numel, itemsize)
    return zeros if ops.tape.adds_in_place else ops.new(zeros.numel, itemsize)
