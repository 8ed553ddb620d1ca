"""A layer's parameters, and its matrix products with their adapters on the tape."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel_scale.planning.models.model_facts import LinearFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.ops import Ops
from accel_scale.planning.tape.tensors import Parameter, Tensor


@dataclass
class Weights:
    """Parameters by name, created on first use."""

    setup: TrainingSetup
    adapted: frozenset[str]
    made: dict[str, Parameter] = field(default_factory=dict)

    @property
    def base_trained(self) -> bool:
        """True if the model's own weights are trained."""
        return self.setup.trains_all

    def base(self, name: str, numel: float) -> Parameter:
        """A weight of the model; a module named in ``full_modules`` is trained besides adapters."""
        trained = self.base_trained or name in self.setup.lora.full_modules
        return self._get(name, numel, self.setup.trained_bytes if trained else self.setup.frozen_bytes, trained)

    def adapter(self, name: str, numel: float) -> Parameter:
        """A weight of an adapter."""
        return self._get(name, numel, self.setup.trained_bytes, True)

    def _get(self, name: str, numel: float, itemsize: int, trained: bool) -> Parameter:
        if name not in self.made:
            self.made[name] = Parameter(numel, itemsize, trained=trained)
        return self.made[name]


def adapter_key(facts: LinearFacts) -> str:
    """Key that tells adapted linears apart: experts and the linears of a shared expert may have the same name."""
    return f"experts.{facts.name}" if facts.copies > 1 else facts.name


def linear(ops: Ops, weights: Weights, facts: LinearFacts, x: Tensor, block: str) -> Tensor:
    """A matrix product, quantised or not, with its adapter; `block` tells linears with the same name apart."""
    setup, name = weights.setup, f"{block}.{facts.name}"
    bias = weights.base(f"{name}.bias", facts.out_features) if facts.bias else None
    if setup.quantises_base and facts.quantisable:
        out = ops.quantised_linear(x, facts.in_features, facts.out_features)
    else:
        weight = weights.base(name, facts.in_features * facts.out_features)
        if facts.written_out:
            out = ops.linear(x, weight, facts.out_features, is_cached=False)
            out = out if bias is None else ops.add(out, Tensor(None, bias.numel, bias.itemsize, bias.node))
        else:
            out = ops.linear(x, weight, facts.out_features, bias)
    if adapter_key(facts) not in weights.adapted:
        return out
    # Handed over, so that it is freed with its last name, as in PEFT.
    handed = [out]
    del out
    return _adapted(ops, weights, facts, x, handed, name)


def _adapted(ops: Ops, weights: Weights, facts: LinearFacts, x: Tensor, handed: list[Tensor], name: str) -> Tensor:
    """PEFT's ``result + lora_B(lora_A(x)) * scaling``, with `x` in the adapter's dtype."""
    out, setup = handed.pop(), weights.setup
    itemsize, rank = out.itemsize, setup.lora.rank
    down = weights.adapter(f"{name}.A", rank * facts.in_features)
    up = weights.adapter(f"{name}.B", rank * facts.out_features)
    # PEFT copies the result of 4-bit layers, and leaves casts to autocast on CUDA.
    is_quantised = setup.quantises_base and facts.quantisable
    leaves_casts = is_quantised and setup.autocast and ops.tape.is_cuda
    if is_quantised:
        out = ops.copy(out)
    if not leaves_casts:
        x = ops.cast(x, down.itemsize)
    if setup.lora.dora:
        out = _dora(ops, weights, facts, x, out, (down, up, weights.adapter(f"{name}.magnitude", facts.out_features)))
        return ops.cast(out, itemsize)
    dropped = ops.dropout(x) if setup.lora.dropout else x
    update = ops.scale(ops.linear(ops.linear(dropped, down, rank), up, facts.out_features))
    del dropped
    if is_quantised and not leaves_casts:
        update = ops.cast(update, itemsize)
    out = ops.add(out, update)
    del update
    return ops.cast(out, itemsize)


def _dora(
    ops: Ops, weights: Weights, facts: LinearFacts, x: Tensor, out: Tensor, adapter: tuple[Parameter, ...]
) -> Tensor:
    """PEFT's DoRA: the norm of the updated weight, from matrices of its size, and a learned magnitude per output."""
    rank, (down, up, magnitude) = weights.setup.lora.rank, adapter
    matrices = _norm_of_updated(ops, weights, facts, x.itemsize, down.itemsize)
    scale = ops.scale(Tensor(None, magnitude.numel, magnitude.itemsize, magnitude.node))
    update = ops.linear(ops.linear(x, down, rank), up, facts.out_features)
    base = ops.shift(out) if facts.bias else out
    first = ops.mul(ops.shift(scale), base)
    result = ops.add(first, ops.scale(ops.mul(scale, update)))
    del first, base, update, matrices
    return ops.add(out, result)


def _norm_of_updated(
    ops: Ops, weights: Weights, facts: LinearFacts, itemsize: int, adapter_bytes: int
) -> list[Tensor]:
    """What the norm's computation keeps until the layer is done: two matrices and an identity."""
    size = facts.in_features * facts.out_features
    compute = ops.tape.autocast_bytes or adapter_bytes
    identity = ops.new(facts.in_features**2, adapter_bytes)
    product_input = identity if compute == adapter_bytes else ops.new(facts.in_features**2, compute)
    del identity
    low = ops.tape.product(facts.in_features * weights.setup.lora.rank, compute)
    update = ops.tape.product(size, compute)
    del low
    if compute != itemsize:
        update = ops.new(size, itemsize)
    is_quantised = weights.setup.quantises_base and facts.quantisable
    frozen = weights.setup.compute_bytes if is_quantised else weights.setup.frozen_bytes
    base = ops.new(size if is_quantised else 0, frozen)
    if frozen != itemsize:
        base = ops.new(size, itemsize)
    scaled = ops.new(size, itemsize)
    total = ops.new(size, itemsize)
    del scaled, total
    return [product_input, update, base]
