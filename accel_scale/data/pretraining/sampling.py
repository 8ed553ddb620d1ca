"""Samples of blocks from all of the data: number of tokens, held-out blocks, texts for tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accel_scale.data.pretraining.blocks import Block, BlockSource
from accel_scale.data.pretraining.encoding import Encoder
from accel_scale.data.pretraining.finding import NamedSource, find_sources
from accel_scale.data.pretraining.order import Permutation
from accel_scale.data.pretraining.prepared import PreparedSource
from accel_scale.errors import ConfigError

_ESTIMATE_BLOCKS, _ESTIMATE_CHARACTERS = 16, 16 << 10
_SAMPLE_BYTES = 64 << 20


@dataclass(frozen=True)
class TokenEstimate:
    """Tokens of the training part of all sources, in one pass; `exact` if all of them are prepared."""

    tokens: int
    exact: bool


def estimate_tokens(sources: Sequence[tuple[BlockSource, int]], encoder: Encoder) -> TokenEstimate:
    """Tokens of the first blocks of each source, as many as given."""
    total, exact = 0.0, True
    for source, num_blocks in sources:
        if isinstance(source, PreparedSource):
            total += sum(source.block_tokens(block) for block in range(num_blocks))
            continue
        exact = False
        order = Permutation(num_blocks, 0)
        blocks = [source.read(order[index]) for index in range(min(_ESTIMATE_BLOCKS, num_blocks))]
        total += sum(_block_tokens(block, encoder) for block in blocks) / len(blocks) * num_blocks
    return TokenEstimate(round(total), exact)


def _block_tokens(block: Block, encoder: Encoder) -> float:
    texts = block.texts or []
    sample: list[int] = []
    characters = 0
    for index in range(len(texts)):
        if characters < _ESTIMATE_CHARACTERS:
            sample.append(index)
            characters += len(texts[index])
    tokens = sum(map(len, block.encode(sample, encoder)))
    return tokens / max(1, characters) * sum(map(len, texts))


def held_out_blocks(named: NamedSource, share: float) -> int:
    """Number of a source's last blocks to hold out: its share, and as many more as it takes to include text."""
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
        max_bytes: About how much to read, from several sources by their shares.

    Raises:
        ConfigError: as `open_pretraining_data`, or for prepared data, which has tokens and no text.
    """
    sources, _ = find_sources(data, text_column=text_column, text_documents=text_documents)
    for one in sources:
        if isinstance(one.source, PreparedSource):
            raise ConfigError(
                f"{one.name} has tokens and no text.", place="--tokenizer", fix="name the tokenizer it was made with."
            )
    all_of_it = sum(one.source.size_bytes for one in sources) <= max_bytes
    for one in sources:
        num_blocks = one.source.num_blocks - held_out_blocks(one, validation_share)
        order = Permutation(num_blocks, 0)
        left = float("inf") if all_of_it else max_bytes * one.weight
        for index in range(num_blocks):
            if left <= 0:
                break
            texts = one.source.read(order[index]).texts or []
            left -= sum(map(len, texts))
            yield from texts
