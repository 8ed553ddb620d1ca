"""Opened pretraining data: facts about it, its loaders, and the text behind a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.finding import NamedSource
from accel_scale.data.pretraining.order import mixed
from accel_scale.data.pretraining.rows import parse_row_id
from accel_scale.data.pretraining.sampling import TokenEstimate, estimate_tokens
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from accel_scale.data.pretraining.loader import TrainLoader
    from accel_scale.data.pretraining.validation import ValidationLoader


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a source, for reports.

    Args:
        label: Prefix of its row ids.
        name: As the user wrote it.
        kind: ``jsonl``, ``text``, ``arrow``, ``parquet`` or ``prepared``.
        size_bytes: Bytes of text, or of files for JSON lines.
        share: Share of the training tokens; all shares sum to 1.
        num_blocks: Total number of blocks.
        num_validation_blocks: Number of blocks held out, from the last.
    """

    label: str
    name: str
    kind: str
    size_bytes: int
    share: float
    num_blocks: int
    num_validation_blocks: int


class PretrainingData:
    """Opened sources; made by `open_pretraining_data`.

    Attributes:
        sources: Facts about each source.
        notes: Lines the user should see.
        has_validation: Whether there are rows for `validation_loader`.
    """

    def __init__(
        self,
        sources: Sequence[NamedSource],
        validation: Sequence[NamedSource],
        encoder: Encoder,
        *,
        row_length: int,
        seed: int,
        isolate_documents: bool,
        num_held_out: Sequence[int],
        notes: tuple[str, ...],
    ) -> None:
        self._named, self._validation, self._encoder = list(sources), list(validation), encoder
        self._row_length, self._seed, self._isolate, self.notes = row_length, seed, isolate_documents, notes
        self.sources = tuple(
            SourceFacts(one.label, one.name, one.source.kind, one.source.size_bytes, one.weight, *blocks)
            for one, *blocks in zip(sources, (one.source.num_blocks for one in sources), num_held_out, strict=True)
        )
        self.has_validation = bool(validation) or any(num_held_out)

    @property
    def files(self) -> list[Path]:
        """The local files that are trained on."""
        return [Path(path) for one in self._named for path in getattr(one.source, "paths", ())]

    def _run(self, global_batch_size: int) -> dict[str, Any]:
        """Everything that the order of rows depends on, as JSON; a resumed run must agree with it."""
        sizes = [
            [facts.num_blocks, facts.num_validation_blocks, facts.size_bytes, round(facts.share, 12)]
            for facts in self.sources
        ]
        return {
            "seed": self._seed,
            "global_batch_size": global_batch_size,
            "row_length": self._row_length,
            "tokenizer": self._encoder.fingerprint(),
            "sources": sizes,
        }

    def train_loader(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        state: Mapping[str, Any] | None = None,
        pin_memory: bool = False,
    ) -> TrainLoader:
        """An endless loader of this rank's part of each step's global batch.

        Args:
            global_batch_size: Rows of one optimizer step on all ranks together.
            micro_batch_size: Rows of one forward pass on one rank; the rest is gradient accumulation.
            rank, world_size: This process among those that share the global batch.
            num_workers: Processes that read and tokenise beside this one; 0: this one does, between steps.
            state: Position to continue from: `merge_states`' result, or this rank's `TrainLoader.state_dict()`.
            pin_memory: Return tensors in pinned memory, from which copies to a GPU are asynchronous.

        Raises:
            ConfigError: for numbers that do not divide, or the state of another run.
        """
        from accel_scale.data.pretraining.lanes import TrainingSource
        from accel_scale.data.pretraining.loader import TrainLoader

        sources = [
            TrainingSource(
                label=one.label,
                source=one.source,
                num_blocks=facts.num_blocks - facts.num_validation_blocks,
                weight=one.weight,
                seed=mixed(self._seed, index),
            )
            for index, (one, facts) in enumerate(zip(self._named, self.sources, strict=True))
        ]
        return TrainLoader(
            sources,
            self._encoder,
            self._run(global_batch_size),
            isolate_documents=self._isolate,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            state=state,
            pin_memory=pin_memory,
        )

    def validation_loader(
        self, *, micro_batch_size: int, rank: int = 0, world_size: int = 1, max_rows: int | None = None
    ) -> ValidationLoader:
        """This rank's part of the validation rows, in an order that does not depend on the seed.

        Args:
            micro_batch_size: Rows of one forward pass on one rank.
            rank, world_size: This process among those that share the rows.
            max_rows: Rows on all ranks together, from several sources by their shares; None: all.

        Raises:
            ConfigError: if nothing was held out and no validation data was named.
        """
        from accel_scale.data.pretraining.validation import ValidationLoader, ValidationSource

        if not self.has_validation:
            raise ConfigError(
                "there is nothing to validate on.",
                place="--validation_share",
                fix="hold out a share, such as 0.01, or name data with --validation_data.",
            )
        sources = [
            ValidationSource(one.label, one.source, 0, one.source.num_blocks, one.weight) for one in self._validation
        ] or [
            ValidationSource(
                one.label,
                one.source,
                facts.num_blocks - facts.num_validation_blocks,
                facts.num_validation_blocks,
                one.weight,
            )
            for one, facts in zip(self._named, self.sources, strict=True)
        ]
        return ValidationLoader(
            sources,
            self._encoder,
            row_length=self._row_length,
            isolate_documents=self._isolate,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            max_rows=max_rows,
        )

    def row_text(self, row_id: str) -> str:
        """The documents of a row with their locations, as text, to inspect a row.

        Raises:
            ConfigError: not a row id, or one of other data.
        """
        label, pieces = parse_row_id(row_id)
        found = next((one for one in self._named if one.label == label), None)
        if found is None:
            raise ConfigError(
                f"no source is called {label!r}; there is {', '.join(one.label for one in self._named)}.",
                place=row_id,
                fix="open the data that the row came from.",
            )
        parts = []
        for piece in pieces:
            if piece.block >= found.source.num_blocks or piece.document >= len(found.source.read(piece.block)):
                raise ConfigError("the data has no such document.", place=row_id, fix="open the row's own data.")
            tokens = found.source.read(piece.block).encode([piece.document], self._encoder)[0]
            place = found.source.place(piece.block, piece.document)
            end = len(tokens) if piece.end is None else piece.end
            which = "" if piece.end is None else f", tokens {piece.start} to {end} of {len(tokens)}"
            parts.append(f"── {place}{which}\n{self._encoder.decode(tokens[piece.start : end])}")
        return "\n".join(parts)

    def estimate_tokens(self) -> TokenEstimate:
        """Tokens in one pass over the training part of all sources, counted or estimated from a few blocks."""
        return estimate_tokens(
            [
                (one.source, facts.num_blocks - facts.num_validation_blocks)
                for one, facts in zip(self._named, self.sources, strict=True)
            ],
            self._encoder,
        )
