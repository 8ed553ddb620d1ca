"""Loader workers that start from a pickle: what cannot be pickled is reported before they start."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accel_scale.data.worker_start import refuse_unpicklable
from accel_scale.errors import ConfigError


class Rows(Dataset[Any]):
    """Four rows and an extra object."""

    def __init__(self, extra: Any = None) -> None:
        self.extra = extra

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def loader(extra: Any = None, *, start: str | None = "spawn", num_workers: int = 1, **kwargs: Any) -> DataLoader[Any]:
    context = start if num_workers else None
    return DataLoader(Rows(extra), num_workers=num_workers, multiprocessing_context=context, **kwargs)


def refused(made: DataLoader[Any]) -> str | None:
    try:
        refuse_unpicklable(made, place="DataLoader(num_workers=)")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("extra", [lambda row: row, threading.Lock()], ids=["a lambda", "a lock"])
def test_a_data_set_that_torch_could_not_hand_over_is_refused(start: str, extra: Any) -> None:
    made = loader(extra, start=start)
    line = refused(made)
    assert line is not None
    assert line.startswith(
        f"DataLoader(num_workers=): workers of data loaders start by {start} here, and the data set"
    )
    assert "Fix: define it at the top of a module" in line
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        next(iter(made))


def test_forked_workers_and_none_take_anything() -> None:
    def double(row: Any) -> Any:
        return row

    assert refused(loader(double, start="fork")) is None
    assert refused(loader(double, num_workers=0)) is None
    assert list(loader(double, start="fork")) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["collate_fn", "worker_init_fn"])
def test_functions_on_it_are_looked_at_too(name: str) -> None:
    line = refused(loader(**{name: lambda *args: None}))
    assert line is not None
    assert f"the {name} cannot be pickled" in line


@pytest.mark.parametrize(
    "extra", [None, torch.zeros(3), np.zeros(3), {"rows": ["a"]}, multiprocessing.get_context("spawn").Lock()]
)
def test_what_can_be_handed_over_is_not_refused(extra: Any) -> None:
    made = loader(extra)
    assert refused(made) is None


def test_numbers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("the tensor was pickled")

    values = torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", fail)
    assert refused(loader(values)) is None


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_systems_own_way_counts_where_the_loader_names_none(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [name for name in ("fork", "spawn") if name != method]
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [method, *others])
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: None)
    assert (refused(loader(lambda row: row, start=None)) is None) == (method == "fork")


def _loop(made: Callable[[], DataLoader[Any]]) -> None:
    from accel_scale import ScalePlugin

    ScalePlugin().accelerator(cpu=True).prepare(made())


def test_a_loop_with_the_plugin_says_it() -> None:
    with pytest.raises(ConfigError, match=r"^DataLoader\(num_workers=\): workers"):
        _loop(lambda: loader(lambda row: row))
    _loop(loader)
