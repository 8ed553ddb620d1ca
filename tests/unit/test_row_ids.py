"""Batches carry the ids of their rows through everything that Accelerate does to a loader."""

from __future__ import annotations

import datasets
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from accel_scale.training.checkpoints.row_ids import ROW_IDS, number_rows, take_row_ids


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def collate(rows: list) -> dict:
    return {"value": torch.tensor([row["value"] for row in rows])}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_numbers_are_those_of_the_rows(num_workers: int, kind: str) -> None:
    rows = [{"value": 100 + number} for number in range(10)]
    dataset = rows if kind == "list" else datasets.Dataset.from_list(rows).shuffle(seed=1)
    loader = Accelerator(cpu=True).prepare(
        DataLoader(dataset, batch_size=3, shuffle=True, collate_fn=collate, num_workers=num_workers)
    )
    assert number_rows(loader)
    assert len(loader.dataset) == 10
    seen = []
    for batch in loader:
        numbers = take_row_ids(batch)
        assert batch.keys() == {"value"}
        assert [dataset[number]["value"] for number in numbers.tolist()] == batch["value"].tolist()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(10))


def test_skipped_batches_stay_skipped() -> None:
    rows = [{"value": number} for number in range(10)]
    loader = Accelerator(cpu=True).prepare(DataLoader(rows, batch_size=2, collate_fn=collate))
    number_rows(loader)
    batches = list(skip_first_batches(loader, 3))
    assert [batch[ROW_IDS].tolist() for batch in batches] == [[6, 7], [8, 9]]


def test_streams_have_no_numbers_and_stay_as_they_are() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from ({"value": number} for number in range(4))

    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(), batch_size=2, collate_fn=collate))
    assert not number_rows(loader)
    batches = list(loader)
    assert [batch["value"].tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert take_row_ids(batches[0]) == ()
    assert take_row_ids([1, 2]) == ()
