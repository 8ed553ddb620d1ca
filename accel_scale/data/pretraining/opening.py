"""Open pretraining data: find its sources, check them against the run, and hold a part of them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.finding import NamedSource, find_sources
from accel_scale.data.pretraining.opened import PretrainingData
from accel_scale.data.pretraining.sampling import held_out_blocks
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    process to come; hub data sets are downloaded first.

    Args:
        data: A .txt, .jsonl, .parquet or .arrow file, a folder or a glob of such, a `datasets.save_to_disk` folder, a
            hub id (``id:configuration``), or a folder made by `accel-scale prepare`. Or several of them, each with
            its share of the tokens as ``name=weight``; without weights, shares follow their bytes.
        tokenizer: Prepared data must have been made with the same one.
        row_length: Tokens of a row; documents are packed, and continue in the next row if they do not fit.
        seed: Determines the order of blocks and documents.
        text_column: Column of the text.
        text_documents: Unit of a document in a .txt file: the ``file``, each ``line``, or each ``paragraph``.
        isolate_documents: Give `position_ids` that restart with each document.
        validation_share: The last share of each source's blocks is held out, at least one block; 0: nothing.
        validation_data: Separate data to validate on, named like `data`.

    Raises:
        ConfigError: data that does not exist or cannot be read, a missing column, another tokenizer than prepared
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
        num_held_out=[held_out_blocks(one, validation_share) for one in sources],
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
