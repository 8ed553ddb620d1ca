"""Self-attention of families without transformers' attention interface: Falcon, GPT-J, BLOOM."""

from __future__ import annotations

from accel_scale.planning.tape.attention import Attention, spelt_attention
from accel_scale.planning.tape.experts import gathered
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.rotation import rotate, turned
from accel_scale.planning.tape.tables import Tables
from accel_scale.planning.tape.tensors import Tensor

_POSITION_BYTES = 8


class FalconAttention(Attention):
    """Falcon's attention: rotary or ALiBi, with one, some or all heads of keys and values."""

    def __call__(self, x: Tensor) -> Tensor:
        hidden_bytes = x.itemsize
        fused = self._linear(0, x)
        del x
        query, key, value = self._parts(fused)
        if self.model.rotary_dims:
            query, key = turned(self.ops, self.model, self.family, query, key, self.tables)
        if self.setup.attention == "eager":
            out = self._eager_falcon(query, key, value, hidden_bytes)
        else:
            out = self._fused_falcon(query, key, value)
        out = self._linear(-1, out)
        del fused, query, key, value
        return out

    def _parts(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ops, head = self.ops, self.rows * self.model.head_dim
        queries, keys = head * self.model.num_heads, head * self.model.num_kv_heads
        if self.model.layer_variant == "grouped":
            query, key, value = ops.part(fused, queries), gathered(ops, fused, keys, 1), gathered(ops, fused, keys, 1)
            # Each is copied when its heads are laid side by side, keys and values once for every query head.
            query = ops.copy(query)
            key = _spread(ops, key, queries)
            return query, key, _spread(ops, value, queries)
        if self.model.num_kv_heads == 1:
            return ops.part(fused, queries), gathered(ops, fused, keys, 1), gathered(ops, fused, keys, 1)
        return ops.part(fused, queries), ops.part(fused, keys), ops.part(fused, keys)

    def _fused_falcon(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.tables.masks.get(self.facts.sliding_window)
        if self.setup.attention == "sdpa" and key.numel != query.numel:
            # No fused kernel supports one key head for many query heads.
            prepare = (self._whole, lambda x: self._for_all(x, query.numel), lambda x: self._for_all(x, query.numel))
            return spelt_attention(self.ops, (query, key, value), mask, self._num_scores(), query.numel, prepare)
        return self.ops.attention(query, key, value, self.rows * self.model.num_heads, mask)

    def _eager_falcon(self, query: Tensor, key: Tensor, value: Tensor, hidden_bytes: int) -> Tensor:
        ops, mask = self.ops, self.tables.masks[self.facts.sliding_window]
        assert mask is not None
        numel, num_scores = query.numel, self._num_scores()
        by_head = self._whole(ops.autocast(query))
        product = ops.matmul(by_head, self._for_all(ops.autocast(key), numel), num_scores)
        del by_head
        scores = product
        if self.model.rotary_dims:
            logits = product
        else:
            # ALiBi is added to the scores, and the mask, which also contains it, to the result.
            scores = ops.cast(product, FP32)
            logits = ops.shift(scores)
        logits = ops.scaled_in_place(logits)
        weights = ops.softmax(ops.add(logits, mask), hidden_bytes)
        if self.model.attention_dropout and not self.model.rotary_dims:
            weights = ops.dropout(weights)
        self.kept = weights
        out = ops.matmul(weights, self._for_all(ops.autocast(value), numel), numel)
        del product, scores, logits
        return ops.copy(out)

    def _num_scores(self) -> float:
        return self.rows * self.model.num_heads * self.setup.sequence_length

    def _whole(self, x: Tensor) -> Tensor:
        """Heads before positions, the layout of a batched product: a copy if there are several rows."""
        return x if self.setup.micro_batch_size == 1 else self.ops.copy(x)

    def _for_all(self, x: Tensor, numel: float) -> Tensor:
        """The same for keys or values, one head of which may serve all."""
        if x.numel == numel:
            return self._whole(x)
        return self.ops.repeat(x, numel, is_view=self.setup.micro_batch_size == 1)


def _spread(ops: Ops, x: Tensor, numel: float) -> Tensor:
    """Heads copied to `numel` values, even if the number does not change."""
    source, itemsize = x.numel, x.itemsize
    return ops.custom([x], numel, itemsize, [], lambda grad: [ops.new(source, itemsize)])


class GptjAttention(Attention):
    """GPT-J's attention: tables are picked and expanded in each layer, scores are in fp32."""

    def __call__(self, x: Tensor) -> Tensor:
        ops = self.ops
        query, key, value = (self._linear(index, x) for index in range(3))
        del x
        rows = self.setup.micro_batch_size if self.setup.packing else 1
        width = self.model.rotary_dims
        whole = ops.new(rows * self.model.max_positions * width, FP32)
        positions = self.rows / self.setup.micro_batch_size * rows * width
        indices = ops.new(positions * _POSITION_BYTES, 1)
        picked = ops.cast(ops.new(positions, FP32), key.itemsize)
        key_turned, key_rest = self._turned_part(key)
        query_turned, query_rest = self._turned_part(query)
        key, query = ops.join([key_turned, key_rest]), ops.join([query_turned, query_rest])
        if self.setup.attention == "eager":
            out = self._scored(query, key, value)
        else:
            out = ops.attention(query, key, value, self.rows * self.model.num_heads)
        out = self._linear(-1, out)
        del whole, indices, picked, key_turned, key_rest, query_turned, query_rest, query, key, value
        return out

    def _turned_part(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ops, numel = self.ops, x.numel * self.model.rotary_dims / self.model.head_dim
        first, rest = ops.part(x, numel), ops.part(x, x.numel - numel)
        positions = numel / self.model.num_heads
        if not self.setup.packing:
            positions /= self.setup.micro_batch_size
        tables = Tables(ops.new(positions, x.itemsize), ops.new(positions, x.itemsize))
        return rotate(ops, first, tables), rest

    def _scored(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops, numel, mask = self.ops, query.numel, self.tables.masks[self.facts.sliding_window]
        assert mask is not None
        query, key = ops.cast(query, FP32), ops.cast(key, FP32)
        scores = self.rows * self.model.num_heads * self.setup.sequence_length
        weights = ops.matmul(self._by_head(query, False), self._by_head(key, False), scores)
        weights = ops.scale(weights)
        weights = ops.add(weights, mask)
        weights = ops.softmax(weights, FP32 if ops.tape.is_cuda and ops.tape.autocast_bytes else weights.itemsize)
        weights = ops.cast(weights, value.itemsize)
        if self.model.attention_dropout:
            weights = ops.dropout(weights)
        self.kept = weights
        return ops.copy(ops.matmul(weights, self._by_head(value, False), numel))


class BloomAttention(Attention):
    """BLOOM's attention: the product of queries and keys adds ALiBi, and the attention itself adds the residual."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        ops, rows = self.ops, self.rows * self.model.num_heads
        fused = self._linear(0, x)
        del x
        query, key, value = (self._by_head(ops.part(fused, fused.numel / 3), False) for _ in range(3))
        mask, itemsize = self.tables.masks[self.facts.sliding_window], query.itemsize
        assert mask is not None
        scores = ops.matmul(query, key, rows * self.setup.sequence_length, is_scaled=True)
        weights = ops.add(scores, mask)
        probabilities = ops.cast(ops.softmax(weights), itemsize)
        if self.model.attention_dropout:
            probabilities = ops.dropout(probabilities)
        self.kept = probabilities
        out = self._linear(-1, ops.copy(ops.matmul(probabilities, value, query.numel)))
        if self.model.residual_dropout:
            out = ops.dropout(out)
        assert residual is not None
        out = ops.add(residual, out)
        del fused, query, key, value, scores, weights, probabilities
        return out
