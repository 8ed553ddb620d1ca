"""Worker processes that start with a pickle of their data set, which not every data set supports."""

from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import torch
from torch.utils.data import DataLoader

from accel_scale.errors import ConfigError

_PARTS = {"dataset": "data set", "collate_fn": "collate_fn", "worker_init_fn": "worker_init_fn"}


def refuse_unpicklable(loader: DataLoader[object], *, place: str) -> None:
    """Refuse a loader whose workers would have to be sent objects that cannot be pickled.

    Forked workers, as on Linux, inherit them. Windows and macOS spawn workers (and Python 3.14 on Linux uses a fork
    server), which receive a pickle of the data set and its functions.

    Args:
        loader: Before or after Accelerate has prepared it.
        place: The setting for its number of workers.

    Raises:
        ConfigError: naming the part and the pickling error.
    """
    method = _start_method(loader)
    if loader.num_workers == 0 or method == "fork":
        return
    for name, words in _PARTS.items():
        try:
            _Probe(_Nowhere()).dump(getattr(loader, name))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"workers of data loaders start by {method} here, and the {words} cannot be pickled for it: {error}.",
                place=place,
                fix="define it at the top of a module, without lambdas or open files in it, or use 0 workers.",
            ) from None
        except RuntimeError:
            continue  # locks and queues, which can be passed on only while a process starts


def _start_method(loader: DataLoader[object]) -> str:
    # Asking for the current method would set it; the first one available is the system's default.
    context = loader.multiprocessing_context or multiprocessing
    own = context.get_start_method(allow_none=True)
    return str(own or multiprocessing.get_all_start_methods()[0])


class _Probe(pickle.Pickler):
    """Skips numeric tensors and arrays, which can always be pickled and may be large."""

    def reducer_override(self, value: object) -> object:  # type: ignore[override]  # NotImplemented is in no type
        is_plain = type(value) is torch.Tensor or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
        return (int, ()) if is_plain else NotImplemented


class _Nowhere:
    def write(self, content: bytes) -> int:
        return len(content)
