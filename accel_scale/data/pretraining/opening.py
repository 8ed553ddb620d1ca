"""Open pretraining data: sources with their shares, what of them is held out, and the loaders of both parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_scale.data.pretraining.blocks import Block
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.finding import NamedSource, find_sources
from accel_scale.data.pretraining.order import Permutation, mixed
from accel_scale.data.pretraining.prepared import PreparedSource
from accel_scale.data.pretraining.rows import parse_row_id
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from accel_scale.data.pretraining.loader import TrainLoader
    from accel_scale.data.pretraining.validation import ValidationLoader

_ESTIMATE_BLOCKS, _ESTIMATE_CHARACTERS = 16, 16 << 10
_SAMPLE_BYTES = 256 << 20


@dataclass(frozen=True)
class SourceFacts:
    """What a report says of a source.

    Args:
        label: What its row ids begin with.
        name: As the user wrote it.
        kind: ``jsonl``, ``text``, ``arrow``, ``parquet`` or ``prepared``.
        size_bytes: Bytes of text, or of files for JSON lines.
        share: Of the training tokens; of all sources together 1.
        num_blocks: Blocks in all.
        num_validation_blocks: The last so many of them are held out.
    """

    label: str
    name: str
    kind: str
    size_bytes: int
    share: float
    num_blocks: int
    num_validation_blocks: int


@dataclass(frozen=True)
class TokenEstimate:
    """Tokens of the training part of all sources, once each; `exact` where all of them are prepared."""

    tokens: int
    exact: bool


def open_pretraining_data(
    data: str | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    row_length: int,
    seed: int = 42,
    text_column: str = "text",
    text_documents: str = "file",
    isolate_documents: bool = False,
    validation_share: float = 0.0,
    validation_data: str | Sequence[str] | None = None,
) -> PretrainingData:
    """Open text to pretrain on. Takes no time for JSON lines, text and prepared data, whatever their size.

    Every process of a launch may call it. Parquet files with large row groups are converted first, by the first
    process that comes; hub data sets are downloaded first.

    Args:
        data: A .txt, .jsonl, .parquet or .arrow file, a folder or a glob of such, a `datasets.save_to_disk` folder, a
            hub id (``id:configuration``), or a folder made by `accel-scale prepare`. Or several of them, each with
            its share of the tokens as ``name=weight``; without weights, shares follow their bytes.
        tokenizer: Prepared data must have been made with the same one.
        row_length: Tokens of a row; documents are packed, and go on in the next row where they do not fit.
        seed: Tells the order of blocks and documents.
        text_column: Column of the text.
        text_documents: What is one document of a .txt file: the ``file``, each ``line``, or each ``paragraph``.
        isolate_documents: Give `position_ids` that restart with each document.
        validation_share: The last share of each source's blocks is held out, at least one block; 0: nothing.
        validation_data: Data of its own to validate on, named as `data`.

    Raises:
        ConfigError: data that is not there or cannot be read, a missing column, another tokenizer than prepared
            data's, a share outside [0, 1), a source too small to hold anything out.
    """
    if row_length < 2:
        raise ConfigError(f"rows of {row_length} tokens predict nothing.", place="row_length", fix="give 2 or more.")
    if not 0 <= validation_share < 1:
        raise ConfigError(
            f"{validation_share} is not a share.",
            place="--validation_share",
            fix="give 0 to hold nothing out, or 0.01.",
        )
    if validation_share and validation_data:
        raise ConfigError(
            "validation data is named, and a share of the training data is held out, too.",
            place="--validation_share",
            fix="give one of the two.",
        )
    encoder = Encoder(tokenizer)
    options = {"text_column": text_column, "text_documents": text_documents}
    sources, notes = find_sources(data, **options)
    others, other_notes = (
        find_sources(validation_data, **options, place="--validation_data") if validation_data else ([], [])
    )
    _check_tokenizer([*sources, *others], encoder)
    return PretrainingData(
        sources,
        others,
        encoder,
        row_length=row_length,
        seed=seed,
        isolate_documents=isolate_documents,
        num_held_out=[_held_out(one, validation_share) for one in sources],
        notes=(*notes, *other_notes),
    )


def _check_tokenizer(sources: Sequence[NamedSource], encoder: Encoder) -> None:
    for one in sources:
        if one.tokenizer is not None and one.tokenizer != encoder.fingerprint():
            raise ConfigError(
                f"{one.name} was prepared with another tokenizer than this run's.",
                place="--data",
                fix="prepare the data with this run's tokenizer, or train with the one it was prepared with.",
            )


def _held_out(named: NamedSource, share: float) -> int:
    """How many of a source's last blocks are held out: its share, and as many more as it takes to have text."""
    if not share:
        return 0
    num_blocks = named.source.num_blocks
    count = max(1, round(num_blocks * share))
    while count < num_blocks and not any(len(named.source.read(num_blocks - 1 - index)) for index in range(count)):
        count += 1
    if count >= num_blocks:
        raise ConfigError(
            f"{named.name} is too small to hold {share:.3g} of it out: nothing would be left to train on.",
            place="--validation_share",
            fix="name validation data of its own with --validation_data, or hold nothing out.",
        )
    return count


class PretrainingData:
    """Opened sources; made by `open_pretraining_data`.

    Attributes:
        sources: Facts about each source.
        notes: Lines the user should see.
        has_validation: Whether `validation_loader` has anything to give.
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

    def _run(self, global_batch_size: int) -> dict[str, Any]:
        """All that the order of rows depends on, as JSON: what a resumed run must agree with."""
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
        """This rank's part of each step's global batch, without end.

        Args:
            global_batch_size: Rows of one optimizer step on all ranks together.
            micro_batch_size: Rows of one forward pass on one rank; the rest is gradient accumulation.
            rank, world_size: This process among those that share the global batch.
            num_workers: Processes that read and tokenise beside this one; 0: in this one, between the steps.
            state: Where to go on: `merge_states`' result, or this rank's `TrainLoader.state_dict()`.
            pin_memory: Return tensors in pinned memory, from where they are copied to a GPU without waiting.

        Raises:
            ConfigError: numbers that do not divide, or a state of another run.
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
        """This rank's part of the validation rows, in an order that no seed changes.

        Args:
            micro_batch_size: Rows of one forward pass on one rank.
            rank, world_size: This process among those that share the rows.
            max_rows: Rows on all ranks together; of several sources in their shares. None: all.

        Raises:
            ConfigError: nothing was held out and no validation data named.
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
        """The documents of a row with their places, as text: for people who look at what a row was.

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
        total, exact = 0.0, True
        for one, facts in zip(self._named, self.sources, strict=True):
            source, num_blocks = one.source, facts.num_blocks - facts.num_validation_blocks
            if isinstance(source, PreparedSource):
                total += sum(source.block_tokens(block) for block in range(num_blocks))
                continue
            exact = False
            order = Permutation(num_blocks, mixed(self._seed))
            blocks = [source.read(order[index]) for index in range(min(_ESTIMATE_BLOCKS, num_blocks))]
            total += sum(self._block_tokens(block) for block in blocks) / len(blocks) * num_blocks
        return TokenEstimate(round(total), exact)

    def _block_tokens(self, block: Block) -> float:
        texts = block.texts or []
        sample: list[int] = []
        characters = 0
        for index in range(len(texts)):
            if characters < _ESTIMATE_CHARACTERS:
                sample.append(index)
                characters += len(texts[index])
        tokens = sum(map(len, block.encode(sample, self._encoder)))
        return tokens / max(1, characters) * sum(map(len, texts))


def sample_texts(
    data: str | Sequence[str],
    *,
    text_column: str = "text",
    text_documents: str = "file",
    validation_share: float = 0.0,
    max_bytes: int = _SAMPLE_BYTES,
) -> Iterator[str]:
    """Texts of the training part of `data`, to build a tokenizer from: all of it, or blocks from all over it.

    Args:
        data, text_column, text_documents, validation_share: As for `open_pretraining_data`.
        max_bytes: Read about so much; of several sources in their shares.

    Raises:
        ConfigError: as `open_pretraining_data`, or prepared data, which has tokens and no text.
    """
    sources, _ = find_sources(data, text_column=text_column, text_documents=text_documents)
    for one in sources:
        if isinstance(one.source, PreparedSource):
            raise ConfigError(
                f"{one.name} has tokens and no text.", place="--tokenizer", fix="name the tokenizer it was made with."
            )
    all_of_it = sum(one.source.size_bytes for one in sources) <= max_bytes
    for one in sources:
        num_blocks = one.source.num_blocks - _held_out(one, validation_share)
        order = Permutation(num_blocks, 0)
        left = float("inf") if all_of_it else max_bytes * one.weight
        for index in range(num_blocks):
            if left <= 0:
                break
            texts = one.source.read(order[index]).texts or []
            left -= sum(map(len, texts))
            yield from texts
