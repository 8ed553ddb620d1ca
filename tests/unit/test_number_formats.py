"""Numbers shown to users have no exponents, whatever their size."""

from __future__ import annotations

import pytest

from accel_scale.reporting.comm_tables import gigabytes
from accel_scale.units import format_bytes, three_digits

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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (999.4, "999"), (999.6, "1000"), (2250, "2250"), (-1234.5, "-1234"), (0, "0")],
)
def test_three_digits_never_become_an_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_links_of_more_than_a_terabyte_a_second_are_readable() -> None:
    assert gigabytes(1.8e12) == "1800"
