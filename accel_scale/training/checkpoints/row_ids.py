"""Identify the rows of a batch: a data loader's batches that contain their rows' numbers."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

ROW_IDS = "row_ids"


def number_rows(loader: Any) -> bool:
    """Make the batches of a prepared loader carry `ROW_IDS`: the numbers of their rows in the data set.

    Accelerate's loaders delegate to a `base_dataloader`, whose data set torch does not allow to be replaced after
    construction; before its first iteration the attribute is only looked up (checked on torch 2.13 and accelerate
    1.15.0; tests/unit/test_row_ids.py fails if that changes).

    Returns:
        True if they do; rows of streamed data sets have no numbers.
    """
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base.dataset, torch.utils.data.IterableDataset) or not hasattr(base.dataset, "__getitem__"):
        return False
    vars(base)["dataset"] = NumberedRows(base.dataset)
    base.collate_fn = NumberedCollator(base.collate_fn)
    return True


def take_row_ids(batch: object) -> Any:
    """Remove the row numbers from `batch` and return them; an empty tuple if there are none."""
    return batch.pop(ROW_IDS, ()) if isinstance(batch, MutableMapping) else ()


class NumberedRows(torch.utils.data.Dataset[Any]):
    """A map-style data set whose rows are (number, row); everything else is the wrapped data set's."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: object) -> tuple[Any, Any]:
        return number, self._dataset[number]

    def __getitems__(self, numbers: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Fetch all rows of a batch at once, the fastest way for `datasets`."""
        fetch = getattr(self._dataset, "__getitems__", None)
        rows = [self._dataset[number] for number in numbers] if fetch is None else fetch(numbers)
        return list(zip(numbers, rows, strict=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":  # while being unpickled in a worker
            raise AttributeError(name)
        return getattr(self._dataset, name)


class NumberedCollator:
    """A collator for (number, row): calls the collator for rows and adds the numbers to its batch."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, numbered: list[tuple[Any, Any]]) -> Any:
        batch = self._collate([row for _, row in numbered])
        if isinstance(batch, MutableMapping):
            batch[ROW_IDS] = torch.tensor([int(number) for number, _ in numbered])
        return batch
