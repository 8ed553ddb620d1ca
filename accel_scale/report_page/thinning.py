"""Thins long series without changing how they look, by keeping the lowest and highest point of every stretch."""

from __future__ import annotations

from collections.abc import Sequence

from accel_scale.report_page.reading import Point

# Points of all plots on a page together, and the fewest and most of one series.
_POINTS_PER_PAGE, _FEWEST, _MOST = 40_000, 60, 2_000


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """At most `most` of `points`, in order: first, last, and both extremes of stretches of equal length."""
    if len(points) <= most:
        return points
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        begin, end = len(points) * stretch // stretches, len(points) * (stretch + 1) // stretches
        within = range(begin, end)
        kept |= {min(within, key=lambda at: points[at][1]), max(within, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def points_per_series(num_series: int, *, share: float = 1.0) -> int:
    """Points that each of `num_series` series may have on one page, scaled by `share` if the page is too large."""
    return max(_FEWEST, min(_MOST, int(_POINTS_PER_PAGE * share / max(1, num_series))))
