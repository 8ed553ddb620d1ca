"""Median and median absolute deviation (MAD) of a curve's recent values, and a threshold for outliers above them."""

from __future__ import annotations

import math
import statistics
from collections import deque

# MAD × 1.4826 is the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826


class RunningEstimate:
    """Median and MAD of the last accepted values.

    Args:
        least_ratio: Minimum ratio of threshold to median.
        is_logarithmic: For positive, heavy-tailed values: distances are ratios.
    """

    def __init__(self, window: int, min_steps: int, *, least_ratio: float, is_logarithmic: bool = False) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self._min_steps, self._least_ratio, self._is_logarithmic = min_steps, least_ratio, is_logarithmic

    def add(self, value: float) -> None:
        """Accept a value; values that are not finite, or have no logarithm, are ignored."""
        if math.isfinite(value) and (value > 0 or not self._is_logarithmic):
            self.values.append(value)

    def threshold(self, sigmas: float) -> float | None:
        """The value `sigmas` robust standard deviations above the median; None while there are too few values."""
        if len(self.values) < self._min_steps:
            return None
        values = [math.log(value) for value in self.values] if self._is_logarithmic else list(self.values)
        median = statistics.median(values)
        distance = sigmas * _MAD_TO_SIGMA * statistics.median([abs(value - median) for value in values])
        if self._is_logarithmic:
            exponent = median + max(distance, math.log(self._least_ratio))
            return math.exp(min(exponent, 700.0))  # the largest float is e^709
        return median + max(distance, (self._least_ratio - 1) * abs(median))
