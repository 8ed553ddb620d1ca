"""Tensors of the same step at several sizes, found in each other's events and fitted as polynomials."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from accel_scale.planning.models.traced import Document
from accel_scale.planning.traced.polynomials import Point, Polynomial, fitted, powers_of, summed, value_of

# Bytes allocated and freed, in order, by segment.
Run = dict[str, list[int]]

# Sizes at which each segment's highest point is searched.
_GRID = [(rows, round(2 ** (step / 2))) for step in range(37) for rows in (1, 4, 16, 64)]
# Left to the planner's own head.
_HEAD = "head"


def are_alike(runs: Iterable[Run]) -> bool:
    """True if all runs allocate and free in the same order."""
    shapes = {tuple((name, tuple(event > 0 for event in events)) for name, events in run.items()) for run in runs}
    return len(shapes) == 1


def by_event(runs: Sequence[Run], points: Sequence[Point]) -> Document | None:
    """Segments of runs that are alike, from a polynomial for every event; None if one cannot be fitted."""
    found: Document = {}
    for name in runs[0]:
        if name == _HEAD:
            continue
        events = [_polynomial(values, points) for values in zip(*(run[name] for run in runs), strict=True)]
        known = [polynomial for polynomial in events if polynomial is not None]
        if len(known) < len(events):
            return None
        found[name] = _segment(known)
    return found


def by_row(few: Run, more: Run, rows: Point) -> Document:
    """Segments of one length, every event as a constant plus a multiple of the rows; the runs are alike."""
    found: Document = {}
    for name in few:
        if name == _HEAD:
            continue
        per_row = [(b - a) / (rows[1] - rows[0]) for a, b in zip(few[name], more[name], strict=True)]
        found[name] = _segment(
            [[a - rows[0] * each, 0.0, 0.0, each, 0.0, 0.0] for a, each in zip(few[name], per_row, strict=True)]
        )
    return found


def by_loop(runs: Sequence[Run], points: Sequence[Point]) -> Document | None:
    """Segments of runs whose layers loop over chunks of a row, so that longer rows have more events.

    Events that all runs have are fitted one by one. What the chunks leave, and their highest point, grow with the
    length. A segment may have two such loops, as where a layer is recomputed; of more, the highest point is rough.

    Args:
        points: Four sizes; the third length is one unit longer than the first, the others some more units.
    """
    if len({tuple(run) for run in runs}) > 1:
        return None
    found: Document = {}
    for name in runs[0]:
        if name == _HEAD:
            continue
        peaks: list[Polynomial] = []
        net = summed([])
        for part in _parts([run[name] for run in runs], points):
            if isinstance(part, Loop):
                sums = [[0, *itertools.accumulate(events)] for events in part.events]
                left, peak = (
                    _growing([value(each) for each in sums], points) for value in (lambda each: each[-1], max)
                )
                if left is None or peak is None:
                    return None
                peaks.append(summed([net, peak]))
                net = summed([net, left])
            else:
                peaks += [summed([net, polynomial]) for polynomial in _running(part)]
                net = summed([net, *part])
        found[name] = {"net": net, "peaks": _highest(peaks)}
    return found


@dataclass(frozen=True)
class Loop:
    """The events of a loop over chunks, in each run: one chunk in the shortest."""

    events: Sequence[Sequence[int]]


def _parts(events: Sequence[Sequence[int]], points: Sequence[Point]) -> list[Loop | list[Polynomial]]:
    """The events of a segment: those that all runs have, and loops of which longer rows have more."""
    before = _common(events, points)
    after = _common([each[len(before) :][::-1] for each in events], points)[::-1]
    middles = [each[len(before) : len(each) - len(after)] for each in events]
    unit = points[2][1] - points[0][1]
    counts = [(length - points[0][1]) // unit for _, length in points]
    more = len(middles[2]) - len(middles[0])
    if not more:
        return [before, Loop(middles), after] if middles[0] else [before, after]
    if any(len(middle) != len(middles[0]) + count * more for middle, count in zip(middles, counts, strict=True)):
        return [before, Loop(middles), after]
    # How many events of a chunk are before those between the loops; the others are after them.
    blocks = {}
    for width in range(more + 1) if middles[0] else (more,):
        starts = [width * count for count in counts]
        blocks[width] = _common([each[at:] for each, at in zip(middles, starts, strict=True)], points)
    width = max(blocks, key=lambda width: len(blocks[width]))
    block = blocks[width]
    # Each loop gets the chunk that the shortest run has, too, so that its highest point is there in all of them.
    given, taken = min(width, len(before)), min(more - width, len(after))
    ends = [len(before) + width * count for count in counts]
    first = [each[len(before) - given : end] for each, end in zip(events, ends, strict=True)]
    last = [each[end + len(block) : len(each) - len(after) + taken] for each, end in zip(events, ends, strict=True)]
    return [before[: len(before) - given], Loop(first), block, Loop(last), after[taken:]]


def _common(events: Sequence[Sequence[int]], points: Sequence[Point]) -> list[Polynomial]:
    """The events at the beginning that all runs have."""
    found: list[Polynomial] = []
    for values in zip(*events, strict=False):
        polynomial = _polynomial(values, points) if len({value > 0 for value in values}) == 1 else None
        if polynomial is None:
            break
        found.append(polynomial)
    return found


def _polynomial(values: Sequence[int], points: Sequence[Point]) -> Polynomial | None:
    """The polynomial through the first three of `values` if the others are on it."""
    found = fitted(values[:3], points[:3])
    if found is None or any(
        abs(value_of(found, *point) - value) > 1e-9 * abs(value)
        for point, value in zip(points[3:], values[3:], strict=True)
    ):
        return None
    return found


def _growing(values: Sequence[float], points: Sequence[Point]) -> Polynomial | None:
    """A constant, and multiples of the length, of the rows and of both; with one row, of the length alone."""
    chosen = (0, 1) if all(rows == 1 for rows, _ in points) else (0, 1, 3, 4)
    powers = torch.tensor([[powers_of(*point)[k] for k in chosen] for point in points], dtype=torch.float64)
    given = torch.tensor(values, dtype=torch.float64)
    terms = torch.linalg.lstsq(powers, given[:, None]).solution[:, 0].tolist()
    found = [terms[chosen.index(k)] if k in chosen else 0.0 for k in range(6)]
    most = max(abs(value) for value in values)
    misses = (abs(value_of(found, *point) - value) for point, value in zip(points, values, strict=True))
    return found if max(misses) <= 1e-3 * most else None


def _segment(events: Sequence[Polynomial]) -> Document:
    return {"net": summed(events), "peaks": _highest(_running(events))}


def _running(events: Sequence[Polynomial]) -> list[Polynomial]:
    """The sums of the events up to each of them."""
    return torch.tensor(events, dtype=torch.float64).cumsum(0).tolist() if events else []


def _highest(sums: Sequence[Polynomial]) -> list[Polynomial]:
    """Those of `sums` that are the highest at some size."""
    if not sums:
        return [summed([])]
    candidates = torch.tensor(sums, dtype=torch.float64)
    sizes = torch.tensor([powers_of(*point) for point in _GRID], dtype=torch.float64)
    highest, places = (candidates @ sizes.T).max(0)
    found = sorted(set(places[highest > 0].tolist()))
    return [candidates[place].tolist() for place in found] or [summed([])]
