"""Lanes: each row of the global batch is an endless stream, whose state is a few integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel_scale.data.pretraining.blocks import BlockSource
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.order import UnitOrder, first_turns, furthest_behind, mixed, shuffled
from accel_scale.data.pretraining.rows import Piece, row_id
from accel_scale.errors import ConfigError

# Documents are tokenised this many characters at a time: a lane's first row must not wait for a whole block.
_ENCODE_CHARACTERS = 32 << 10
# Cuts made in documents by a phase must be rare compared with those made by the ends of rows.
_LONG_DOCUMENT_ROWS = 8
# Per lane and source: rows taken (including the lane's late entry), position in the units, document in the unit,
# tokens of that document.
LaneState = list[list[int]]


@dataclass(frozen=True)
class TrainingSource:
    """A source with everything that lanes need to walk through it.

    Args:
        label: Prefix of its row ids.
        source: Its blocks.
        num_blocks: Number of blocks to train on, from the first.
        weight: Share of the rows.
        seed: Determines the order of its units and documents.
    """

    label: str
    source: BlockSource
    num_blocks: int
    weight: float
    seed: int


class _OpenUnit:
    """The documents of one unit in the order in which its lane takes them, tokenised as they are needed."""

    def __init__(self, source: TrainingSource, order: UnitOrder, position: int, encoder: Encoder, length: int) -> None:
        self.unit = order[position]
        self._encoder, self._length = encoder, length
        self._block = source.source.read(self.unit.block)
        self._key = mixed(source.seed, self.unit.epoch, self.unit.block)
        documents = shuffled(len(self._block), self._key).tolist()
        part, parts = self.unit.part, self.unit.parts
        # Slices of a block divide its documents among them; with more slices than documents, the documents' tokens.
        self._cut = (0, 1)
        if 0 < len(documents) < parts:
            index, count = part % len(documents), len(documents)
            self._cut = (part // count, (parts - index - 1) // count + 1)
            documents = [documents[index]]
        elif parts > 1:
            documents = documents[part::parts]
        self.documents: list[int] = documents
        self._encoded: dict[int, np.ndarray] = {}

    def _tokens(self, index: int) -> np.ndarray:
        if index not in self._encoded:
            texts, last, characters = self._block.texts, index, 0
            while last < len(self.documents) and (texts is None or characters < _ENCODE_CHARACTERS):
                characters += len(texts[self.documents[last]]) if texts else 0
                last += 1
            arrays = self._block.encode(self.documents[index:last], self._encoder)
            self._encoded = dict(enumerate(arrays, index))
        return self._encoded[index]

    def num_tokens(self, index: int) -> int:
        """Tokens of a document of the unit, including those outside the unit's part of it."""
        return len(self._tokens(index))

    def stretches(self, index: int) -> list[tuple[int, int, np.ndarray]]:
        """(document, first token, tokens) of one document in the order its lane takes them.

        A document is one stretch. A fragment of continuous text, or a document of many rows, is taken from an offset
        that differs by epoch to its end, and then from its beginning to that offset: rows are cut at different places
        in each epoch, and lanes that meet in one document, because there are few, do not take the same rows.
        """
        document, tokens = self.documents[index], self._tokens(index)
        phase = 0
        if len(tokens) > (1 if self._block.is_fragment(document) else _LONG_DOCUMENT_ROWS) * self._length:
            phase = mixed(self._key, document) % len(tokens)
        part, parts = self._cut
        parts = max(1, min(parts, len(tokens) // self._length))  # no part is shorter than a row
        if part >= parts:
            return []
        first, last = len(tokens) * part // parts, len(tokens) * (part + 1) // parts
        found = []
        # First come the tokens from `phase` on, then those before it.
        for start, end, shift in (
            (first, min(last, len(tokens) - phase), phase),
            (max(first, len(tokens) - phase), last, phase - len(tokens)),
        ):
            if start < end:
                found.append((document, start + shift, tokens[start + shift : end + shift]))
        return found


class _Cursor:
    """A lane's position in one source."""

    def __init__(self, source: TrainingSource, order: UnitOrder, encoder: Encoder, stride: int) -> None:
        self._source, self._order, self._encoder, self._stride = source, order, encoder, stride
        self.position = self.document = self.offset = 0
        self._unit: _OpenUnit | None = None
        self._stretches: list[tuple[int, int, np.ndarray]] | None = None

    def _next_stretch(self, length: int) -> tuple[int, int, np.ndarray, int]:
        """(document, its first token here, tokens, number of them already taken) at the cursor."""
        empty_units = 0
        while True:
            if self._unit is None:
                self._unit = _OpenUnit(self._source, self._order, self.position, self._encoder, length)
            if self.document >= len(self._unit.documents):
                empty_units += 1
                if empty_units > 64 * (self._order.num_units + 1):
                    raise ConfigError(f"{self._source.label} has no text.", place="--data", fix="leave it out.")
                self.position += self._stride
                self.document = self.offset = 0
                self._unit = self._stretches = None
                continue
            if self._stretches is None:
                self._stretches = self._unit.stretches(self.document)
            taken = self.offset
            for document, first, tokens in self._stretches:
                if taken < len(tokens):
                    return document, first, tokens, taken
                taken -= len(tokens)
            self.document, self.offset, self._stretches = self.document + 1, 0, None

    def fill(self, ids: np.ndarray, starts: np.ndarray) -> str:
        """Write one row: token ids, and True where a document begins. Returns the row's id."""
        filled, pieces = 0, []
        while filled < len(ids):
            document, first, tokens, taken = self._next_stretch(len(ids))
            count = min(len(tokens) - taken, len(ids) - filled)
            ids[filled : filled + count] = tokens[taken : taken + count]
            starts[filled] |= taken == 0
            assert self._unit is not None
            block, begin = self._unit.unit.block, first + taken
            whole = count == self._unit.num_tokens(self.document)
            pieces.append(Piece(block, document) if whole else Piece(block, document, begin, begin + count))
            self.offset += count
            filled += count
        return row_id(self._source.label, pieces)


class Lane:
    """One row of the global batch, step after step."""

    def __init__(self, sources: Sequence[TrainingSource], cursors: list[_Cursor], taken: list[int]) -> None:
        self._weights = [source.weight for source in sources]
        self._cursors, self._taken = cursors, taken

    def fill(self, ids: np.ndarray, starts: np.ndarray) -> str:
        """Write the next row; returns its id."""
        turn = furthest_behind(self._weights, self._taken)
        name = self._cursors[turn].fill(ids, starts)
        self._taken[turn] += 1
        return name

    def state(self) -> LaneState:
        """The lane's position after the rows filled so far."""
        return [
            [taken, cursor.position, cursor.document, cursor.offset]
            for taken, cursor in zip(self._taken, self._cursors, strict=True)
        ]


@dataclass
class Rows:
    """Rows of several lanes at one step.

    Args:
        ids: Token ids, int32, (lanes, row length).
        starts: True where a document begins, (lanes, row length).
        row_ids: One per row.
    """

    ids: np.ndarray
    starts: np.ndarray
    row_ids: list[str]

    def stacked(self, *, positions: bool) -> np.ndarray:
        """int32 (2 or 3, lanes, row length): token ids, labels, and with `positions` position ids.

        A label is the token itself, or -100 where a document begins: nothing is predicted from the document before.
        Positions count from the beginning of the document, or of the row.
        """
        arrays = [self.ids, np.where(self.starts, np.int32(-100), self.ids)]
        if positions:
            columns = np.arange(self.ids.shape[1], dtype=np.int32)
            arrays.append(columns - np.maximum.accumulate(np.where(self.starts, columns, 0), axis=1))
        return np.stack(arrays)


class LaneSet:
    """The lanes of one worker.

    Args:
        sources: What the lanes read.
        encoder: Turns their text into tokens.
        lanes: Numbers of these lanes in the global batch.
        num_lanes: Rows of the global batch.
        row_length: Tokens of a row.
        states: Lane number as text → state to continue from; None: from the beginning.
    """

    def __init__(
        self,
        sources: Sequence[TrainingSource],
        encoder: Encoder,
        lanes: Sequence[int],
        *,
        num_lanes: int,
        row_length: int,
        states: Mapping[str, LaneState] | None = None,
    ) -> None:
        orders = [UnitOrder(source.num_blocks, num_lanes, source.seed) for source in sources]
        turns = first_turns([source.weight for source in sources], lanes) if states is None else {}
        self.lanes, self._row_length = list(lanes), row_length
        self._lanes: list[Lane] = []
        for number in lanes:
            cursors = [
                _Cursor(source, order, encoder, num_lanes) for source, order in zip(sources, orders, strict=True)
            ]
            if states is None:
                taken = turns[number]
                for cursor in cursors:
                    cursor.position = number
            else:
                state: Any = states[str(number)]
                taken = [int(one[0]) for one in state]
                for cursor, one in zip(cursors, state, strict=True):
                    cursor.position, cursor.document, cursor.offset = map(int, one[1:])
            self._lanes.append(Lane(sources, cursors, taken))

    def step(self) -> Rows:
        """The next row of every lane."""
        shape = (len(self._lanes), self._row_length)
        ids, starts = np.empty(shape, dtype=np.int32), np.zeros(shape, dtype=bool)
        return Rows(ids, starts, [lane.fill(*row) for lane, *row in zip(self._lanes, ids, starts, strict=True)])

    def state(self) -> dict[str, LaneState]:
        """Lane number as text → state."""
        return {str(number): lane.state() for number, lane in zip(self.lanes, self._lanes, strict=True)}
