"""Amounts of memory are written without exponents, whatever their size."""

from __future__ import annotations

import pytest

from accel_scale.units import format_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1000, "1000 B"),
        (999.4 * MIB, "999 MiB"),
        (1010 * MIB, "1010 MiB"),
        (-1010 * MIB, "-1010 MiB"),
        (1023.4 * 1024 * MIB, "1023 GiB"),
        (1024 * MIB, "1 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_memory_between_powers_of_1000_and_1024_has_no_exponent(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
