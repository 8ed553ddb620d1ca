"""Sequence lengths from a sample, and their effect on padding and packing."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

_ANSWERS = ("chosen", "rejected")
PERCENTILES = (5, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True)
class LengthDistribution:
    """Sequence lengths in tokens.

    Args:
        num_sampled: Rows measured.
        mean_tokens, max_tokens: Over the sample, before truncation.
        percentile_tokens: (percentile, tokens) pairs.
        truncated_share: Rows longer than `max_length`.
        lost_token_share: Tokens that truncation to `max_length` cuts off.
        padded_waste: Share of padding positions in random batches of `batch_size`, each padded to its longest.
        sorted_waste: The same with rows of similar length batched together.
        packed_fill: Share of positions filled when rows are packed into `max_length` by best-fit decreasing.
    """

    num_sampled: int
    mean_tokens: float
    max_tokens: int
    percentile_tokens: tuple[tuple[int, int], ...]
    truncated_share: float
    lost_token_share: float
    padded_waste: float
    sorted_waste: float
    packed_fill: float

    def percentile(self, percent: int) -> int:
        """Tokens below which `percent` % of the rows lie; one of `PERCENTILES`."""
        return dict(self.percentile_tokens)[percent]


def length_distribution(
    dataset: Dataset | IterableDataset | Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int,
    batch_size: int,
    num_sampled: int = 2000,
    seed: int = 0,
) -> LengthDistribution:
    """Measure a sample of `num_sampled` rows.

    Args:
        dataset: Tokenised rows (a column `input_ids`), rows in one of TRL's formats together with `tokenizer`,
            or lengths themselves.
        max_length: Tokens a sequence is truncated or packed to.
        batch_size: Sequences of a micro-batch.

    Raises:
        ConfigError: rows that are not tokenised, and no tokenizer.
    """
    from datasets import Dataset, IterableDataset

    if isinstance(dataset, (Dataset, IterableDataset)):
        lengths = np.array([_num_tokens(row, tokenizer) for row in _sample(dataset, num_sampled, seed)])
    else:
        lengths = np.asarray(dataset)
        if len(lengths) > num_sampled:
            lengths = np.random.default_rng(seed).choice(lengths, num_sampled, replace=False)
    if not len(lengths):
        raise ConfigError("no rows to measure.", fix="load a data set that has some.")
    return _measure(lengths, max_length=max_length, batch_size=batch_size, seed=seed)


def _sample(dataset: Dataset, num_rows: int, seed: int) -> Any:
    if not hasattr(dataset, "__len__"):
        return dataset.take(num_rows)
    if len(dataset) <= num_rows:
        return dataset
    chosen = np.random.default_rng(seed).choice(len(dataset), num_rows, replace=False)
    return dataset.select(np.sort(chosen))


def _num_tokens(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    if tokenizer is None:
        raise ConfigError("rows that are not tokenised cannot be measured.", fix="pass the tokenizer.")
    if "chosen" in row:
        answers = [{"prompt": row.get("prompt", type(row[name])()), "completion": row[name]} for name in _ANSWERS]
        return max(_num_tokens(answer, tokenizer) for answer in answers)
    turns = row["messages"] if "messages" in row else row.get("prompt")
    rendered: Any
    if isinstance(turns, list) and "answer" in row:  # made by `as_prompts`, for a model that generates
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    if isinstance(turns, str) and "answer" in row:
        return len(tokenizer(turns, verbose=False)["input_ids"])
    if isinstance(turns, list):
        rendered = tokenizer.apply_chat_template(turns + row.get("completion", []), tokenize=False)
        return len(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    text = row["text"] if "text" in row else row["prompt"] + row["completion"]
    return len(tokenizer(text, verbose=False)["input_ids"]) + 1  # the EOS token that TRL appends


def _measure(lengths: np.ndarray, *, max_length: int, batch_size: int, seed: int) -> LengthDistribution:
    cut = np.minimum(lengths, max_length)
    percentiles = np.percentile(lengths, PERCENTILES, method="higher").astype(int).tolist()
    return LengthDistribution(
        num_sampled=len(lengths),
        mean_tokens=float(lengths.mean()),
        max_tokens=int(lengths.max()),
        percentile_tokens=tuple(zip(PERCENTILES, percentiles, strict=True)),
        truncated_share=float((lengths > max_length).mean()),
        lost_token_share=float(1 - cut.sum() / max(1, lengths.sum())),
        padded_waste=_padding_share(np.random.default_rng(seed).permutation(cut), batch_size),
        sorted_waste=_padding_share(np.sort(cut), batch_size),
        packed_fill=packed_fill(cut, max_length),
    )


def _padding_share(lengths: np.ndarray, batch_size: int) -> float:
    """Padding positions ÷ all positions, batches of consecutive rows padded to their longest."""
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    num_positions = sum(int(batch.max()) * len(batch) for batch in batches)
    return 1 - float(lengths.sum()) / max(1, num_positions)


def packed_fill(lengths: Sequence[int] | np.ndarray, max_length: int) -> float:
    """Tokens ÷ positions after best-fit-decreasing packing into bins of `max_length`, none split.

    TRL packs this way (Ding et al. 2024, arXiv:2404.10830).
    """
    room: list[int] = []  # sorted: positions left in each open bin

    num_bins = 0
    for length in sorted((int(length) for length in lengths), reverse=True):
        at = bisect.bisect_left(room, length)
        if at < len(room):
            left = room.pop(at) - length
        else:
            num_bins, left = num_bins + 1, max_length - length
        if left:
            bisect.insort(room, left)
    return float(np.sum(lengths)) / (num_bins * max_length) if num_bins else 0.0
