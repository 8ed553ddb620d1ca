"""A process that has just communicated ends; it neither waits forever nor is aborted by gloo's threads."""

from __future__ import annotations

import sys

import pytest
import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pins processes to one core"),
]


def test_a_group_is_left_right_after_a_collective() -> None:
    """With torch's own way of leaving, about every third such launch of two processes aborts or hangs."""
    assert torchrun.torchrun("leaving_run.py", 4, "safely", timeout=100).count("left") == 4


@pytest.mark.soak
@pytest.mark.parametrize("attempt", range(10))
def test_it_is_left_every_time(attempt: int) -> None:
    assert torchrun.torchrun("leaving_run.py", 2, "safely", timeout=100).count("left") == 2
