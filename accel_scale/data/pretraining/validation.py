"""Validation rows: finite, the same in every run, with equally many batches on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from accel_scale.data.pretraining.blocks import BlockSource
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.lanes import Rows
from accel_scale.data.pretraining.loader import check_shape
from accel_scale.data.pretraining.order import Permutation, furthest_behind
from accel_scale.errors import ConfigError

# Key of a fixed order, so that runs with different seeds are measured on the same rows.
_ORDER_KEY = 0x5EED
_ENCODED_DOCUMENTS = 64
_KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class ValidationSource:
    """Blocks [first_block, first_block + num_blocks) of a source."""

    label: str
    source: BlockSource
    first_block: int
    num_blocks: int
    weight: float


class ValidationLoader:
    """Micro-batches of validation rows, as dicts of int64 tensors; may be iterated repeatedly.

    Every rank tokenises all rows and keeps its own (in memory, up to 256 MiB). The last row of each source is padded
    with labels of -100, and rows of nothing but padding fill the last micro-batches: sum losses and divide by the
    labels that are not -100. Made by `PretrainingData.validation_loader`.
    """

    def __init__(
        self,
        sources: Sequence[ValidationSource],
        encoder: Encoder,
        *,
        row_length: int,
        isolate_documents: bool,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        max_rows: int | None,
    ) -> None:
        check_shape(micro_batch_size * world_size, micro_batch_size, rank, world_size, 0)
        if max_rows is not None and max_rows < 1:
            raise ConfigError(f"{max_rows} rows are none.", place="max_rows", fix="give 1 or more, or leave it out.")
        self._sources, self._encoder, self._row_length = list(sources), encoder, row_length
        self._positions, self._micro_batch_size = isolate_documents, micro_batch_size
        self._rank, self._world_size, self._max_rows = rank, world_size, max_rows
        self._kept: list[dict[str, torch.Tensor]] | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[dict[str, torch.Tensor]] | None = []
        for batch in self._batches():
            if kept is not None:
                kept.append(batch)
                if len(kept) * sum(values.nbytes for values in batch.values()) > _KEPT_BYTES:
                    kept = None
            yield batch
        self._kept = kept

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        size = self._micro_batch_size
        group: list[tuple[np.ndarray, np.ndarray, int]] = []
        num_rows = 0
        for row in self._rows():
            group.append(row)
            num_rows += 1
            if len(group) == size * self._world_size:
                yield self._batch(group[self._rank * size : (self._rank + 1) * size])
                group = []
            if num_rows == self._max_rows:
                break
        if not num_rows:
            raise ConfigError(
                "the validation data has no text.", place="--validation_share", fix="hold out more, or other data."
            )
        if group:
            yield self._batch(group[self._rank * size : (self._rank + 1) * size])

    def _batch(self, rows: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> dict[str, torch.Tensor]:
        shape = (self._micro_batch_size, self._row_length)
        ids, starts = np.full(shape, self._encoder.pad_id, dtype=np.int32), np.zeros(shape, dtype=bool)
        used = np.zeros(self._micro_batch_size, dtype=np.int64)
        for index, row in enumerate(rows):
            ids[index], starts[index], used[index] = row
        stacked = torch.from_numpy(Rows(ids, starts, []).stacked(positions=self._positions)).long()
        stacked[1].masked_fill_(torch.arange(self._row_length) >= torch.from_numpy(used)[:, None], -100)
        return dict(zip(("input_ids", "labels", "position_ids"), stacked, strict=False))

    def _rows(self) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """(ids, starts, tokens used) of all rows, taking sources in turn by their shares until all are exhausted."""
        active = [(source.weight, self._source_rows(source)) for source in self._sources]
        taken = [0] * len(active)
        while active:
            total = sum(weight for weight, _ in active)
            turn = furthest_behind([weight / total for weight, _ in active], taken)
            row = next(active[turn][1], None)
            if row is None:
                del active[turn], taken[turn]
                continue
            taken[turn] += 1
            yield row

    def _source_rows(self, source: ValidationSource) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        ids, starts, used = self._empty_row()
        for tokens in self._documents(source):
            taken = 0
            while taken < len(tokens):
                count = min(len(tokens) - taken, self._row_length - used)
                ids[used : used + count] = tokens[taken : taken + count]
                starts[used] |= taken == 0
                taken, used = taken + count, used + count
                if used == self._row_length:
                    yield ids, starts, used
                    ids, starts, used = self._empty_row()
        if used:
            yield ids, starts, used

    def _empty_row(self) -> tuple[np.ndarray, np.ndarray, int]:
        return np.full(self._row_length, self._encoder.pad_id, dtype=np.int32), np.zeros(self._row_length, bool), 0

    def _documents(self, source: ValidationSource) -> Iterator[np.ndarray]:
        order = Permutation(source.num_blocks, _ORDER_KEY)
        for index in range(source.num_blocks):
            block = source.source.read(source.first_block + order[index])
            for start in range(0, len(block), _ENCODED_DOCUMENTS):
                yield from block.encode(list(range(start, min(len(block), start + _ENCODED_DOCUMENTS))), self._encoder)
