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
                found_loop = _of_loop(part, points)
                if found_loop is None:
                    return None
                highest, left = found_loop
                peaks += [summed([net, polynomial]) for polynomial in highest]
                net = summed([net, left])
            else:
                peaks += [summed([net, polynomial]) for polynomial in _running(part)]
                net = summed([net, *part])
        found[name] = {"net": net, "peaks": _highest(peaks)}
    return found


@dataclass(frozen=True)
class Loop:
    """The events of a loop over chunks, in each run: one chunk in the shortest.

    Attributes:
        events: Of each run.
        width: Number of a chunk's events.
    """

    events: Sequence[Sequence[int]]
    width: int


def _of_loop(loop: Loop, points: Sequence[Point]) -> tuple[list[Polynomial], Polynomial] | None:
    """The sums that may be the highest within a loop, and what it leaves; None if they cannot be fitted.

    If all chunks have the same events, the sums are the highest in the first or in the last one. There, every event is
    fitted by itself: which of them is the highest may depend on the size.
    """
    sums = [[0, *itertools.accumulate(events)] for events in loop.events]
    left = _growing([each[-1] for each in sums], points)
    if left is None:
        return None
    highest = [max(each) for each in sums]
    width, lasts = loop.width, [len(events) - loop.width for events in loop.events]
    if width and min(lasts) >= 0:
        first = _common([events[:width] for events in loop.events], points)
        last = _common([events[place:] for events, place in zip(loop.events, lasts, strict=True)], points)
        before = _growing([each[place] for each, place in zip(sums, lasts, strict=True)], points)
        at_ends = [max(each[: width + 1] + each[place:]) for each, place in zip(sums, lasts, strict=True)]
        if len(first) == len(last) == width and before is not None and at_ends == highest:
            return [*_running(first), *(summed([before, polynomial]) for polynomial in _running(last))], left
    peak = _growing(highest, points)
    return None if peak is None else ([peak], left)


def _parts(events: Sequence[Sequence[int]], points: Sequence[Point]) -> list[Loop | list[Polynomial]]:
    """The events of a segment: those that all runs have, and loops of which longer rows have more."""
    unit = points[2][1] - points[0][1]
    counts = [(length - points[0][1]) // unit for _, length in points]
    parts: list[Loop | list[Polynomial]] = []
    block = _common(events, points)
    rest = [each[len(block) :] for each in events]
    more = len(rest[2]) - len(rest[0])
    if any(len(each) != len(rest[0]) + count * more for each, count in zip(rest, counts, strict=True)):
        more = 0  # not the same number for every chunk
    while more > 0:
        # How many of a chunk's events are in this loop: after it, all runs go on alike.
        following = {}
        for width in range(1, more + 1) if rest[0] else (more,):
            after = [each[width * count :] for each, count in zip(rest, counts, strict=True)]
            following[width] = _common(after, points)
        width = max(following, key=lambda width: len(following[width]))
        if rest[0] and not following[width]:
            break
        # The loop gets the chunk that the shortest run has, too, so that its highest point is there in all of them.
        given = min(width, len(block))
        before = [each[len(each) - len(left) - given :] for each, left in zip(events, rest, strict=True)]
        loop = [each[: given + width * count] for each, count in zip(before, counts, strict=True)]
        parts += [block[: len(block) - given], Loop(loop, width)]
        block, more = following[width], more - width
        rest = [each[width * count + len(block) :] for each, count in zip(rest, counts, strict=True)]
    parts.append(block)
    if any(rest):
        # Iterations that differ, as a first or last one may: again with the chunk that the shortest run has.
        end = _common([each[::-1] for each in rest], points)[::-1]
        taken = min(max(more, 0), len(end))
        parts += [Loop([each[: len(each) - len(end) + taken] for each in rest], 0), end[taken:]]
    return parts


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
