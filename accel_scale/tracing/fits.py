"""Memory of a fake step by segment, as polynomials of rows and length, from runs of a few sizes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import Document
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.traced.fits import windows_of
from accel_scale.planning.traced.polynomials import Point, Polynomial, interpolated, value_of
from accel_scale.tracing.alignment import Run, are_alike, by_event, by_loop, by_row
from accel_scale.tracing.step import FakeStep

# Lengths are multiples of this, which is a multiple of the chunk sizes of state-space layers; if layers loop over
# chunks, of their usual size; if they loop over tokens, of as few of them as give a fit.
_UNIT, _CHUNK, _TOKENS = 256, 64, (2, 3)
# At least two rows: some operations only view a single row but copy several.
_ROWS = (2, 3)
# Share of a segment's bytes within which two are the same, and within which they are near enough.
_EXACTLY, _NEARLY = 1e-9, 2e-3
# Parts of a segment whose highest points are fitted if its tensors cannot be.
_PARTS = 8
Mark = tuple[float, list[float]]
# Number of tokens for models that loop over tokens and whose events are not found in each other.
_FEW = 32
# Sizes that tell what the number of operations grows with: two of a few tokens, and one of some chunks.
_PROBES, _CHUNKS = ((2, 4), (3, 10)), (1, 2 * _CHUNK)


def fit_segments(
    step: FakeStep, facts: ModelFacts, setup: TrainingSetup, is_exact: bool
) -> tuple[Document, Document | None, bool]:
    """Segments of several rows, those of one row if they differ, and whether they hold for one length only."""
    if is_exact:
        return *_at_length(step, setup.sequence_length), True
    loops = _loops(step, facts)
    if loops == "tokens":
        for unit in _TOKENS:
            found = _by_points(step, unit)
            if found is not None:
                return *found, False
        return _of_few_tokens(step), None, False
    unit, (beyond, most) = 0, _bounds(facts, setup.sequence_length)
    for unit, shortest in _units(beyond, most, loops):
        found = _by_points(step, unit, shortest, most)
        if found is not None:
            return *found, False
    found_by_mark = _by_marks(step, unit) if unit else None
    if found_by_mark is not None:
        return found_by_mark, None, False
    return *_at_length(step, setup.sequence_length), True


def _bounds(facts: ModelFacts, length: int) -> tuple[int, int]:
    """Lengths of rows with the same operations as rows of `length`: more than the first, at most the second.

    Operations of rows longer than a window differ from those of shorter ones; learned positions limit the length.
    """
    windows = windows_of(facts.traced_config)
    beyond = max((window for window in windows if window < length), default=0)
    most = min((window for window in windows if window >= length), default=sys.maxsize)
    return beyond, min(most, facts.max_positions or sys.maxsize)


def _units(beyond: int, most: int, loops: str) -> Iterator[tuple[int, int]]:
    """Units of the lengths that are run, and how many of them the shortest has."""
    # The first, second and last chunks of a loop may differ from the others.
    for unit, shortest in ((_CHUNK, 4), (_UNIT, 2)) if loops == "chunks" else ((_UNIT, 2),):
        if shortest * unit <= beyond:
            unit = _UNIT * (beyond // (shortest * _UNIT) + 1)
        if (shortest + 4) * unit > most:
            unit = max(1, most // (shortest + 4))
            unit -= unit % _CHUNK if unit > _CHUNK else 0
        if shortest * unit > beyond:
            yield unit, shortest


def _by_points(
    step: FakeStep, unit: int, shortest: int = 2, most: int = sys.maxsize
) -> tuple[Document, Document | None] | None:
    """Segments of several rows and of one, from a few sizes each and a longer one that verifies them, or None.

    Args:
        shortest: Number of units in the shortest length.
        most: The longest length that may be run.
    """
    many, within = _of_rows(step, (2, 3, 5, 4), unit, shortest)
    if many is None:
        return None
    single, several = (1, (shortest + 4) * unit), (3, (shortest + 4) * unit)
    alone = _marks(step.run(*single))
    if _is_right(many, alone, single, within):
        return many, None
    if not _is_right(many, _marks(step.run(*several)), several, within):
        return None
    for size in (unit, 2 * unit):  # in longer rows, another operation may need the most
        if (shortest + 3) * size > most:
            break
        one, within = _of_rows(step, (1, 1, 1, 1), size, shortest)
        if one is not None and _is_right(one, alone, single, within):
            return many, one
    return None


def _of_rows(step: FakeStep, rows: Sequence[int], unit: int, shortest: int = 2) -> tuple[Document | None, float]:
    """Segments of these numbers of rows, and the share within which they are right; None if they cannot be fitted."""
    # Chosen so that no two powers of rows and length grow alike.
    points = list(zip(rows, ((shortest + more) * unit for more in (0, 3, 1, 2)), strict=True))
    runs = [step.run(*point) for point in points[:3]]
    if are_alike(runs):
        return by_event(runs, points[:3]), _EXACTLY
    return by_loop([*runs, step.run(*points[3])], points), _NEARLY


def _by_marks(step: FakeStep, unit: int) -> Document | None:
    """Segments from the highest points of their parts; None if they do not give those of another length."""
    lengths, last = (2 * unit, 3 * unit, 5 * unit), (_ROWS[0], 4 * unit)
    few, more = ([_marks(step.run(rows, length)) for length in lengths] for rows in _ROWS)
    found = _by_mark(few, more, lengths)
    return found if _is_right(found, _marks(step.run(*last)), last) else None


def _of_few_tokens(step: FakeStep) -> Document:
    """Segments of a model that loops over tokens, of which only few are run."""
    lengths, last = [_FEW, 2 * _FEW, 3 * _FEW], 4 * _FEW
    few, more = ([_marks(step.run(rows, length)) for length in lengths] for rows in _ROWS)
    found = _by_mark(few, more, lengths)
    mark = _marks(step.run(_ROWS[0], last))
    if _is_right(found, mark, (_ROWS[0], last)):
        return found
    # The runs are too short for a curve, so extrapolate linearly from the two longest.
    longest = _marks(step.run(_ROWS[1], last))
    few, more = ([*marks[2:], then, _onward(marks[2], then)] for marks, then in ((few, mark), (more, longest)))
    return _by_mark(few, more, (lengths[2], last, 2 * last - lengths[2]))


def _at_length(step: FakeStep, length: int) -> tuple[Document, Document]:
    """Segments of several rows and of one row, of this length."""
    few, more = (step.run(rows, length) for rows in _ROWS)
    if are_alike([few, more]):
        many = by_row(few, more, _ROWS)
    else:
        many = _by_mark([_marks(few)] * 3, [_marks(more)] * 3, (length, 2 * length, 3 * length))
    return many, _at(_marks(step.run(1, length)))


_LOOPING: dict[str, str] = {}


def _loops(step: FakeStep, facts: ModelFacts) -> str:
    """What the number of operations grows with: ``tokens``, of which only few are run then, ``chunks``, or nothing.

    Cached per model.
    """
    text = facts.traced_config
    if text not in _LOOPING:
        few, more = (step.forward_allocations(*size) for size in _PROBES)
        if more <= 1.15 * few:
            _LOOPING[text] = "chunks" if step.forward_allocations(*_CHUNKS, at_most=more) > more else ""
        else:
            # Some layers loop over the tokens that are left after the last chunk (xLSTM's).
            _LOOPING[text] = "tokens" if step.forward_allocations(1, _UNIT, at_most=more) > more else "chunks"
    return _LOOPING[text]


def _marks(run: Run) -> dict[str, Mark]:
    """What each segment leaves allocated, and the highest point in each part of its events."""
    found = {}
    for name, events in run.items():
        if name == "head":
            continue
        sums = list(itertools.accumulate(events)) or [0]
        places = [len(sums) * part // _PARTS for part in range(_PARTS + 1)]
        peaks = [max(sums[begin:end], default=sums[-1]) for begin, end in itertools.pairwise(places)]
        found[name] = (float(sums[-1]), [float(max(peak, 0)) for peak in peaks])
    return found


def _onward(before: dict[str, Mark], after: dict[str, Mark]) -> dict[str, Mark]:
    """Extrapolate linearly from `before` through `after`."""
    return {
        name: (2 * net - before[name][0], [2 * b - a for a, b in zip(before[name][1], peaks, strict=True)])
        for name, (net, peaks) in after.items()
    }


def _by_mark(few: Sequence[dict[str, Mark]], many: Sequence[dict[str, Mark]], lengths: Sequence[int]) -> Document:
    """Fit polynomials to each segment's marks, for models whose number of tensors depends on the length.

    The position of a segment's highest point moves with the length, that of a part's highest point hardly.
    """
    nothing: Mark = (0.0, [0.0] * _PARTS)

    def through(name: str, value: Callable[[Mark], float]) -> Polynomial:
        one, other = ([value(mark.get(name, nothing)) for mark in marks] for marks in (few, many))
        return interpolated(one, other, _ROWS, lengths)

    return {
        name: {
            "net": through(name, lambda mark: mark[0]),
            "peaks": [through(name, lambda mark, part=part: mark[1][part]) for part in range(_PARTS)],  # type: ignore[misc]
        }
        for name in few[0]
    }


def _is_right(found: Document, marks: dict[str, Mark], point: Point, within: float = _NEARLY) -> bool:
    """True if `found` gives what each segment leaves within this share, its highest point within five times that."""
    for name, (net, peaks) in marks.items():
        part, peak = found.get(name), max(peaks)
        if part is None or abs(value_of(part["net"], *point) - net) > within * max(peak, abs(net)):
            return False
        if abs(max(value_of(polynomial, *point) for polynomial in part["peaks"]) - peak) > 5 * within * peak:
            return False
    return True


def _at(marks: dict[str, Mark]) -> Document:
    """Constant polynomials for one size."""
    return {
        name: {"net": [net, 0, 0, 0, 0, 0], "peaks": [[max(peaks), 0, 0, 0, 0, 0]]}
        for name, (net, peaks) in marks.items()
    }
