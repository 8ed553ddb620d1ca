"""DeepSeek's latent attention (MLA) on the tape: keys and values expanded from one narrow projection."""

from __future__ import annotations

from accel_scale.planning.tape.attention import Attention, spelt_attention
from accel_scale.planning.tape.linears import linear
from accel_scale.planning.tape.norms import rms_norm
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.rotation import rotate
from accel_scale.planning.tape.tables import Tables
from accel_scale.planning.tape.tensors import Tensor


class LatentAttention(Attention):
    """Call it with the normalised hidden states."""

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ops, linears = self.ops, {item.name: item for item in self.facts.attention}
        heads, turned = self.rows * self.model.num_heads, self.model.rotary_dims
        plain, latent = self.model.head_dim - turned, linears["kv_b_proj"].in_features
        if "q_proj" in linears:
            query = self._by_name("q_proj", x)
        else:
            query = self._by_name("q_b_proj", self._latent_norm("q_a_norm", self._by_name("q_a_proj", x)))
        query_rest, query = ops.split(query, [heads * plain, heads * turned])
        narrow = self._by_name("kv_a_proj_with_mqa", x)
        del x
        keys_values, key = ops.split(narrow, [self.rows * latent, self.rows * turned])
        keys_values = self._latent_norm("kv_a_norm", keys_values)
        query, key = self._turned(query, key)
        query = ops.join([query_rest, query])
        keys_values = self._by_name("kv_b_proj", keys_values)
        sizes = [heads * plain, heads * (self.model.value_dim or self.model.head_dim)]
        key_rest, value = ops.split(keys_values, sizes)
        return query, _filled(ops, key_rest, key, heads * turned), value

    def _attend_here(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        setup, ops = self.setup, self.ops
        if query.numel == value.numel or setup.attention not in ("sdpa", "flash_attention_2", "flash_attention_3"):
            return super()._attend_here(query, key, value)
        if setup.attention != "sdpa":
            # Values are padded to the width of queries, and the result is sliced.
            narrow, itemsize = value.numel, value.itemsize
            value = ops.custom([value], query.numel, itemsize, [], lambda grad: [ops.new(narrow, itemsize)])
            out = ops.attention(query, key, value, self.rows * self.model.num_heads)
            return ops.part(out, narrow)
        if ops.tape.is_cuda:
            return super()._attend_here(query, key, value)
        # The CPU has no kernel for values of a different width.
        scores = self.rows * self.model.num_heads * setup.sequence_length
        mask = self.tables.masks[None]
        if mask is None:
            mask = ops.new(setup.sequence_length**2, 1)
        prepare = (lambda x: x, lambda x: x, self._by_head_uncast)
        return spelt_attention(ops, (query, key, value), mask, scores, value.numel, prepare)

    def _by_head_uncast(self, x: Tensor) -> Tensor:
        return x if self.setup.micro_batch_size == 1 else self.ops.copy(x)

    def _by_name(self, name: str, x: Tensor) -> Tensor:
        facts = next(item for item in self.facts.attention if item.name == name)
        return linear(self.ops, self.weights, facts, x, "attention")

    def _latent_norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights.base(name, x.numel / self.rows)
        return rms_norm(self.ops, x, weight, self.rows, self.family.rms)

    def _turned(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        ops, tables = self.ops, self.tables
        if self.model.model_type == "deepseek_v2":
            # As complex numbers, always in fp32.
            wide = [ops.cast(part, FP32) for part in (query, key)]
            query_turned, key_turned = (ops.mul(part, tables.cos) for part in wide)
            return ops.cast(query_turned, query.itemsize), ops.cast(key_turned, key.itemsize)
        if self.model.layer_variant == "halves":
            query = rotate(ops, query, tables)
            return query, rotate(ops, key, tables)
        even, odd = ops.part(query, query.numel / 2), ops.part(query, query.numel / 2)
        key_even, key_odd = ops.part(key, key.numel / 2), ops.part(key, key.numel / 2)
        return _neighbours(ops, even, odd, tables), _neighbours(ops, key_even, key_odd, tables)


def _neighbours(ops: Ops, even: Tensor, odd: Tensor, tables: Tables) -> Tensor:
    """``cat(even * cos - odd * sin, odd * cos + even * sin)``."""
    first = ops.minus(ops.mul(even, tables.cos), ops.mul(odd, tables.sin))
    return ops.join([first, ops.add(ops.mul(odd, tables.cos), ops.mul(even, tables.sin))])


def _filled(ops: Ops, rest: Tensor, turned: Tensor, spread: float) -> Tensor:
    """Empty keys into which both parts are copied, the rotated one for every head; copies have full-size gradients."""
    total, itemsize = rest.numel + spread, rest.itemsize
    sizes, widths = (rest.numel, turned.numel), (rest.itemsize, turned.itemsize)

    def first_backward(grad: Tensor) -> list[Tensor | None]:
        whole = ops.new(total, itemsize)
        part = ops.new(sizes[0], widths[0])
        del whole
        return [part]

    def second_backward(grad: Tensor) -> list[Tensor | None]:
        whole = ops.new(total, itemsize)
        part = ops.new(spread, itemsize)
        summed = ops.new(sizes[1], widths[1])
        del part
        return [whole, summed]

    keys = ops.custom([rest], total, itemsize, [], first_backward)
    return ops.tape.record(keys.view(), [keys, turned], [], second_backward)
