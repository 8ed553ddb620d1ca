"""Trainers with split rows: what they refuse, how rows are padded, and which ranks read the same rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from datasets import IterableDataset
from torch.utils.data import DataLoader

from accel_scale.errors import ConfigError
from accel_scale.parallel.sequence import cut_batch, pad_rows
from accel_scale.trainers.sequence_mixin import check_trainer, read_rows_in_groups

USUAL = {"neftune_noise_alpha": None, "torch_compile": False, "average_tokens_across_devices": True}


def trainer(*, covers: bool = True, **changed: object) -> SimpleNamespace:
    return SimpleNamespace(_fast_loss_covers_run=covers, args=SimpleNamespace(**{**USUAL, **changed}))


def test_the_usual_settings_are_taken():
    check_trainer(trainer())


@pytest.mark.parametrize(
    ("wrong", "place", "says"),
    [
        (trainer(covers=False), "--loss_type", "not a sum over tokens"),
        (trainer(neftune_noise_alpha=5.0), "--neftune_noise_alpha", "length of whole rows"),
        (trainer(torch_compile=True), "--torch_compile", "not compiled"),
        (trainer(average_tokens_across_devices=False), "--average_tokens_across_devices", "mean of its own"),
    ],
)
def test_what_would_be_another_loss_on_parts_is_refused(wrong, place, says):
    with pytest.raises(ConfigError, match=says) as raised:
        check_trainer(wrong)
    assert raised.value.place == place


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_filled_up_parts_hold_every_token_and_label_once(length, size, packed):
    ids = torch.arange(10, 10 + 2 * length).view(2, length)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if packed:
        batch["position_ids"] = torch.arange(length).expand(2, -1)
    else:
        batch["attention_mask"] = torch.ones_like(ids)
    padded = pad_rows(batch, size, pad_token_id=3)
    parts = [cut_batch(padded, rank, size) for rank in range(size)]
    assert {part["input_ids"].shape for part in parts} == {(2, -(-length // size))}
    whole = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    assert torch.equal(whole["input_ids"][:, :length], ids)
    assert bool((whole["input_ids"][:, length:] == 3).all())
    # Each position predicts the next token; the last position and the padding predict nothing.
    assert torch.equal(whole["shift_labels"][:, : length - 1], ids[:, 1:])
    assert bool((whole["shift_labels"][:, length - 1 :] == -100).all())
    if packed:
        assert bool((whole["position_ids"][:, length:] == 0).all()), "documents of their own"


class OneOf(Accelerator):
    """An accelerator that reports the view of one of several processes."""

    def __init__(self, num_processes: int, rank: int) -> None:
        super().__init__(cpu=True)
        self._seen = num_processes, rank

    num_processes = property(lambda self: self._seen[0])
    process_index = property(lambda self: self._seen[1])


@pytest.mark.parametrize(("num_processes", "size"), [(4, 2), (6, 3), (2, 2), (4, 1)])
def test_groups_read_all_rows_and_a_group_the_same(num_processes, size):
    def rows(rank: int) -> list[list[int]]:
        accelerator = OneOf(num_processes, rank)
        read_rows_in_groups(accelerator, size)
        loader = accelerator.prepare_data_loader(DataLoader(range(24), batch_size=2))
        assert accelerator._dataloaders == [loader]
        if size > 1:
            assert loader.device == accelerator.device, "batches come to the device"
        return [batch.tolist() for batch in loader]

    def of_group(group: int) -> list[list[int]]:
        alike = [rows(group * size + member) for member in range(size)]
        assert all(one == alike[0] for one in alike)
        return alike[0]

    streamed = OneOf(num_processes, num_processes - 1)
    read_rows_in_groups(streamed, size)
    stream = IterableDataset.from_generator(lambda: ({"n": n} for n in range(24)))
    assert not isinstance(streamed.prepare_data_loader(DataLoader(stream, batch_size=2)), DataLoaderDispatcher)
    groups = [of_group(group) for group in range(num_processes // size)]
    seen = sorted(row for batches in groups for batch in batches for row in batch)
    assert seen == list(range(24))
