"""Garbage collection, which looks for reference cycles, switched off for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def cycles_kept() -> Iterator[None]:
    """Collect no cycles within this context; afterwards, collection is on if it was on before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
