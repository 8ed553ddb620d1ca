"""Rows to generate from: a prompt, and the answer that rewards compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.training.evaluation.exact_match import prompt_and_answer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from accel_scale.data.loading import LoadedData


def as_prompts(data: LoadedData, *, place: str) -> LoadedData:
    """`data` with ``prompt`` and ``answer``: the last turn of the assistant, or the completion, is the answer.

    Args:
        data: Rows of ``messages``, or of ``prompt`` and ``completion``.
        place: Where the data were named.

    Raises:
        ConfigError: for rows of plain text, which have no prompt.
    """
    if data.format == "text":
        raise ConfigError(
            "rows of plain text have no prompt to answer.",
            place=place,
            fix="name the columns, e.g. --columns prompt=question completion=answer.",
        )

    def convert(row: dict[str, object], index: int) -> dict[str, object]:
        prompt, answer = prompt_and_answer(row, index)
        return {"prompt": prompt, "answer": answer}

    def converted(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
        gone = [name for name in rows.column_names if name not in ("prompt", "answer", "task")]
        return rows.map(convert, with_indices=True, remove_columns=gone)

    return replace(data, train=converted(data.train), test=None if data.test is None else converted(data.test))
