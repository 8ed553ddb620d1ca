"""Self-attention of transformers' decoder layers on the tape."""

from __future__ import annotations

from collections.abc import Callable

from accel_scale.planning.models.model_facts import LayerFacts, ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.families import Family
from accel_scale.planning.tape.linears import Weights, linear
from accel_scale.planning.tape.norms import norm, spelt_layer_norm
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.parallel import exchanged
from accel_scale.planning.tape.rotation import turned
from accel_scale.planning.tape.tables import Tables
from accel_scale.planning.tape.tensors import Tensor

Prepare = Callable[[Tensor], Tensor]
_INDEX_BYTES = 8
# Documents in a bucket are padded to the longest: the mean over lengths drawn from log-normal distributions.
_SLOTS_PER_TOKEN = 1.18


class Attention:
    """Call it with the normalised hidden states."""

    def __init__(
        self, ops: Ops, model: ModelFacts, facts: LayerFacts, family: Family, setup: TrainingSetup,
        weights: Weights, tables: Tables,
    ) -> None:  # fmt: skip
        self.ops, self.model, self.facts, self.family = ops, model, facts, family
        self.setup, self.weights, self.tables = setup, weights, tables
        self.kept: Tensor | None = None
        # Inside attention, each rank sees whole sequences for its share of the heads: as many values as outside.
        self.rows = setup.micro_batch_size * setup.sequence_length / setup.parallel.sequence_parallel

    def __call__(self, x: Tensor) -> Tensor:
        query, key, value = self._project(x)
        del x
        if self.family.rotation != "none" and self.model.rotary_dims and self.facts.rotates:
            query, key = turned(self.ops, self.model, self.family, query, key, self.tables)
        out = self._attend(query, key, value)
        if self._is_joined() and self.setup.attention != "eager":
            # Joined queries are laid out head by head, and so is the result.
            out = self.ops.copy(out)
        out = self._linear(-1, out)
        del query, key, value
        return out

    def _linear(self, index: int, x: Tensor) -> Tensor:
        return linear(self.ops, self.weights, self.facts.attention[index], x, "attention")

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head = self.rows * self.model.head_dim
        sizes = [head * self.model.num_heads, head * self.model.num_kv_heads, head * self.model.num_kv_heads]
        if self.family.projections != "separate":
            fused = self._linear(0, x)
            if self.family.projections == "split":
                query, key, value = self.ops.split(fused, sizes)
            else:
                query, key, value = (self.ops.part(fused, size) for size in sizes)
            return query, key, value
        if self.model.projection_clip:
            query, key, value = (self._linear(index, x) for index in range(3))
            query, key, value = (self.ops.relaid(self.ops.clamp(part)) for part in (query, key, value))
            return query, key, value
        if self.family.layer_norm == "spelt":
            query, key, value = (self._linear(index, x) for index in range(3))
            query = self.ops.relaid(self._normed("q_norm", query, self.model.num_heads))
            return query, self.ops.relaid(self._normed("k_norm", key, self.model.num_kv_heads)), value
        query = self._linear(0, x)
        if self.family.scales_query:
            query = self.ops.scale(query)
        query = self.ops.relaid(self._normed("q_norm", query, self.model.num_heads))
        key = self.ops.relaid(self._normed("k_norm", self._linear(1, x), self.model.num_kv_heads))
        return query, key, self._linear(2, x)

    def _normed(self, name: str, x: Tensor, heads: int) -> Tensor:
        if not self.facts.query_key_norm:
            return x
        if self.family.layer_norm == "spelt":
            weight = self.weights.base(name, heads * self.model.head_dim)
            return spelt_layer_norm(self.ops, x, weight, self.rows * heads)
        per_head = not self.family.norms_before_heads
        rows, width = (
            (self.rows * heads, self.model.head_dim) if per_head else (self.rows, heads * self.model.head_dim)
        )
        return norm(self.ops, self.model, self.family, self.weights, name, x, rows, width)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over whole sequences; sequence parallelism exchanges heads for positions and back."""
        degree = self.setup.parallel.sequence_parallel
        if degree == 1:
            return self._attend_here(query, key, value)
        keys = key.numel * max(1.0, degree / self.model.num_kv_heads)
        query, key, value = (
            exchanged(self.ops, x, numel) for x, numel in ((query, query.numel), (key, keys), (value, keys))
        )
        out = self._attend_here(query, key, value)
        return exchanged(self.ops, out, out.numel)

    def _attend_here(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        setup = self.setup
        if setup.attention == "eager":
            return self._eager(query, key, value)
        if setup.attention == "sdpa" and setup.packing:
            return self._packed(query, key, value)
        mask = self.tables.masks.get(self.facts.sliding_window)
        if mask is not None or self._lacks_grouped_kernel(query):
            key, value = self._repeated(key, query), self._repeated(value, query)
        return self.ops.attention(query, key, value, self.rows * self.model.num_heads, mask, numel=self._out_numel())

    def _packed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This project's attention over packed rows: documents are gathered into padded buckets and back."""
        ops = self.ops
        query, key, value = (self._moved(ops.autocast(x), x.numel * _SLOTS_PER_TOKEN) for x in (query, key, value))
        if self._lacks_grouped_kernel(query):
            key, value = self._repeated(key, query), self._repeated(value, query)
        statistics = self.rows * self.model.num_heads * _SLOTS_PER_TOKEN
        out = ops.attention(query, key, value, statistics, numel=self._out_numel() * _SLOTS_PER_TOKEN)
        return self._moved(out, self._out_numel())

    def _moved(self, x: Tensor, numel: float) -> Tensor:
        """Rows picked by index; the gradient allocates the source's size."""
        source, itemsize = x.numel, x.itemsize
        return self.ops.custom([x], numel, itemsize, [], lambda grad: [self.ops.new(source, itemsize)])

    def _lacks_grouped_kernel(self, query: Tensor) -> bool:
        """CUDA's kernel for fp32 does not share key heads within a group."""
        compute = self.ops.tape.autocast_bytes or query.itemsize
        return self.ops.tape.is_cuda and compute == FP32 and self.setup.attention == "sdpa"

    def _eager(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops = self.ops
        is_shared, is_joined = 1 < self.model.num_kv_heads < self.model.num_heads, self._is_joined()
        key, value = self._repeated(key, query), self._repeated(value, query)
        scores = self.rows * self.model.num_heads * self.setup.sequence_length
        queries, keys = (
            self._by_head(query, is_joined),
            self._by_head(key, is_shared or (is_joined and self.model.num_kv_heads != 1)),
        )
        product = ops.matmul(queries, keys, scores)
        del queries, keys
        weights = ops.scale(product)
        del product
        if self.model.attention_softcap:
            weights = ops.scale(weights)
            weights = ops.elementwise(weights, saves_input=False)
            weights = ops.scale(weights)
        mask = self.tables.masks[self.facts.sliding_window]
        assert mask is not None
        weights = ops.add(weights, mask)
        if self.family.sinks:
            weights = self._with_sinks(weights)
        elif self.family.eager_fp32:
            weights = ops.softmax(weights)
        else:
            weights = ops.softmax(weights, FP32 if ops.tape.is_cuda and ops.tape.autocast_bytes else weights.itemsize)
        weights = ops.cast(weights, query.itemsize)
        if self.model.attention_dropout:
            weights = ops.dropout(weights)
        # Returned besides the result, and kept until the layer ends.
        self.kept = weights
        return ops.copy(ops.matmul(weights, self._by_head(value, is_shared), self._out_numel()))

    def _with_sinks(self, weights: Tensor) -> Tensor:
        """Probabilities over scores and one sink per head, after subtracting the largest; drops the sinks' part."""
        ops, rows, size = self.ops, self.rows * self.model.num_heads, weights.numel
        parameter = self.weights.base("sinks", self.model.num_heads)
        sinks = ops.expanded(parameter, rows)
        joined = ops.join([weights, sinks])
        total, itemsize = joined.numel, joined.itemsize
        positions = ops.new(rows * _INDEX_BYTES, 1)
        largest = ops.custom([joined], rows, itemsize, [positions], lambda grad: [ops.new(total, itemsize)])
        del positions
        joined = ops.less(joined, largest)
        del largest
        probabilities = ops.softmax(joined, itemsize)
        return ops.part(probabilities, size)

    def _out_numel(self) -> float:
        """Number of values in the result."""
        return self.rows * self.model.num_heads * (self.model.value_dim or self.model.head_dim)

    def _is_joined(self) -> bool:
        """True if queries and keys were joined from parts, and so are laid out head by head."""
        return self.family.attention == "latent" or self.family.rotation in (
            "partial",
            "inline",
            "interleaved",
            "halves",
        )

    def _repeated(self, x: Tensor, query: Tensor) -> Tensor:
        if self.model.num_kv_heads == self.model.num_heads:
            return x
        return self.ops.repeat(x, query.numel, is_view=self.model.num_kv_heads == 1)

    def _by_head(self, x: Tensor, is_by_head: bool) -> Tensor:
        """`x` in the layout of a batched product: copied unless it is laid out head by head already."""
        x = self.ops.autocast(x)
        return x if is_by_head or self.setup.micro_batch_size == 1 else self.ops.copy(x)


def spelt_attention(
    ops: Ops,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    num_scores: float,
    numel: float,
    prepare: tuple[Prepare, Prepare, Prepare],
) -> Tensor:
    """torch's scaled dot-product attention without a fused kernel: single operations, all in fp32.

    `prepare` lays out queries, keys and values for batched products. Without a mask, a causal one holds for all rows.
    """
    query, key, value = (ops.autocast(part) for part in inputs)
    itemsize = query.itemsize
    bias = mask
    if mask is not None and mask.itemsize != itemsize:
        bias = ops.new(mask.numel, itemsize)
    query, key, value = (ops.cast(part, FP32) for part in (query, key, value))
    query, key = ops.scale(query), ops.scale(key)
    keys = prepare[1](key)
    scores = ops.matmul(prepare[0](query), keys, num_scores, is_autocast=False)
    del keys
    if bias is not None and not ops.tape.adds_in_place:
        scores = ops.add(scores, bias)
    probabilities = ops.softmax(scores)
    del scores
    out = ops.matmul(probabilities, prepare[2](value), numel, is_autocast=False)
    out = ops.cast(out, itemsize)
    # Returned in the input's dtype besides the result, and dropped.
    returned = ops.cast(probabilities, itemsize)
    del returned, probabilities
    return ops.copy(out)
