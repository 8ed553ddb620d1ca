"""Bytes as polynomials of rows and length: found exactly from a few sizes, and evaluated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# Coefficients of 1, L, L², B, B·L and B·L².
Polynomial = list[float]
Point = tuple[int, int]

_ZERO: Polynomial = [0.0] * 6


def value_of(polynomial: Sequence[float], rows: float, length: float) -> float:
    """Bytes at a given size."""
    a, b, c, d, e, f = polynomial
    return a + length * (b + length * c) + rows * (d + length * (e + length * f))


def fitted(values: Sequence[float], points: Sequence[Point]) -> Polynomial | None:
    """The polynomial of a tensor that has these bytes at three `points`; None if there is none.

    Almost every tensor is a number times a power of the length, once or for every row: two sizes determine it, the
    third verifies it. Others are sums of two such terms, and the third size singles out one such sum. It may leave
    two by chance; terms of the same sign are then more likely. What is left may be quadratic in the length, once or
    for every row (pairs of a state-space layer's chunks): the three sizes determine that, so that a fourth has to
    verify it.
    """
    (a, b, c), powers = values, [powers_of(*point) for point in points]
    for k in range(6):
        scale = a / powers[0][k]
        if scale * powers[1][k] == b and scale * powers[2][k] == c:
            return [scale if j == k else 0.0 for j in range(6)]
    unlikely: Polynomial | None = None
    for j, k in itertools.combinations(range(6), 2):
        (x1, y1), (x2, y2), (x3, y3) = ((p[j], p[k]) for p in powers)
        divisor = x1 * y2 - x2 * y1
        if not divisor:
            continue
        one, two = (a * y2 - b * y1) / divisor, (x1 * b - x2 * a) / divisor
        if abs(one * x3 + two * y3 - c) <= 1e-9 * abs(c):
            found = list(_ZERO)
            found[j], found[k] = one, two
            if one * two > 0:
                return found
            unlikely = unlikely or found
    if unlikely is not None:
        return unlikely
    lengths = [length for _, length in points]
    for first, counts in ((3, [rows for rows, _ in points]), (0, [1] * len(points))):
        terms = _quadratic([value / count for value, count in zip(values, counts, strict=True)], lengths)
        # Pairs of things have no negative term.
        if all(term * lengths[0] ** power / a > -1e-9 for power, term in enumerate(terms)):
            return [terms[k - first] if first <= k < first + 3 else 0.0 for k in range(6)]
    return None


def powers_of(rows: int, length: int) -> tuple[int, ...]:
    """The powers that the coefficients are multiplied by."""
    return (1, length, length**2, rows, rows * length, rows * length**2)


def interpolated(few: Sequence[float], many: Sequence[float], rows: Point, lengths: Sequence[int]) -> Polynomial:
    """The polynomial through six values: those of `few` and of `many` rows, each at three lengths.

    Args:
        rows: Number of rows in `few`, and in `many`.
    """
    per_row = [(b - a) / (rows[1] - rows[0]) for a, b in zip(few, many, strict=True)]
    fixed = [a - rows[0] * b for a, b in zip(few, per_row, strict=True)]
    return _quadratic(fixed, lengths) + _quadratic(per_row, lengths)


def _quadratic(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    x0, x1, x2 = lengths
    y0, y1, y2 = values
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    square = (second - first) / (x2 - x0)
    slope = first - square * (x0 + x1)
    return [y0 - slope * x0 - square * x0**2, slope, square]


def summed(polynomials: Sequence[Polynomial]) -> Polynomial:
    """The sum of `polynomials`."""
    return [sum(column) for column in zip(*polynomials, strict=True)] if polynomials else list(_ZERO)
