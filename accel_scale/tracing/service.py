"""The planner's interface to real model classes: facts, and memory of a step as polynomials of rows and length."""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import Document
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.traced.polynomials import (
    Point,
    Polynomial,
    fitted,
    interpolated,
    powers_of,
    summed,
    value_of,
)
from accel_scale.planning.traced.steps import windows_of
from accel_scale.tracing.cache import read_cache
from accel_scale.tracing.facts import read_facts
from accel_scale.tracing.skeletons import not_built
from accel_scale.tracing.step import FakeStep

__all__ = ["facts_of", "kept_layers", "traced_fit"]

# Sizes at which each segment's highest point is searched.
_GRID = [(rows, round(2 ** (step / 2))) for step in range(37) for rows in (1, 4, 16, 64)]
# Lengths are multiples of this, which is a multiple of the chunk sizes of state-space layers.
_UNIT = 256
# At least two rows: some operations only view a single row but copy several.
_ROWS = (2, 3)
# Parts of a segment whose highest points are fitted if its tensors cannot be.
_PARTS = 8
Mark = tuple[float, list[float]]
# Number of tokens for models that loop over tokens.
_FEW = 32


def facts_of(values: Mapping[str, object], *, name: str, place: str) -> ModelFacts:
    """Read shapes and parameters of the model that transformers builds from a ``config.json``.

    Raises:
        ConfigError: if transformers cannot build the model.
    """
    try:
        with _quiet():
            return read_facts(values, name=name, place=place)
    except ConfigError:
        raise
    except Exception as error:  # raised by the model's own code
        raise not_built(str(values.get("model_type")), place, error) from None


def traced_fit(
    facts: ModelFacts, setup: TrainingSetup, *, is_cuda: bool, is_tracked: bool, is_exact: bool = False
) -> Document:
    """Memory of a step of a few layers by segment, as polynomials of the number of rows and the length.

    For each segment, ``net`` is what it leaves allocated, and ``peaks`` are the sums that are highest at some size.
    ``exact`` means that the sizes follow no polynomial, and the fit is for this number of rows and length only.

    Args:
        facts: Facts of the model.
        setup: Training setup.
        is_cuda: Whether CUDA's kernels run.
        is_tracked: Whether a memory tracker is active.
        is_exact: Whether the sizes are already known to follow no polynomial.

    Raises:
        ConfigError: if the model cannot take the step.
    """
    try:
        with _quiet():
            try:
                step = FakeStep(facts, setup, is_cuda=is_cuda, is_tracked=is_tracked)
                segments, exact = _segments(step, facts, setup, is_exact)
            except Exception:  # some layers do not run without the others
                step = FakeStep(facts, setup, is_cuda=is_cuda, is_tracked=is_tracked, is_whole=True)
                segments, exact = _segments(step, facts, setup, is_exact)
    except ConfigError:
        raise
    except Exception as error:  # raised by the model's own code
        raise _not_run(facts, "takes no step", error) from None
    return {
        "segments": segments,
        "stands_for": step.stands_for,
        "kinds": step.kinds,
        "hidden_bytes": step.hidden_bytes,
        "given_bytes": step.given_bytes,
        "hidden_size": facts.hidden_size,
        "takes_logits": step.takes_logits,
        "exact": exact,
    }


def kept_layers(facts: ModelFacts, setup: TrainingSetup) -> list[Document]:
    """What the model's layers cache for earlier tokens.

    Raises:
        ConfigError: if the model cannot run without weights, or does not use a standard cache.
    """
    try:
        with _quiet():
            return [asdict(layer) for layer in read_cache(facts, setup)]
    except ConfigError:
        raise
    except Exception as error:  # raised by the model's own code
        raise _not_run(facts, "answers nothing", error) from None


def _not_run(facts: ModelFacts, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ConfigError(
        f"{facts.model_type!r} {what} without weights ({type(error).__name__}: {reason}).",
        place=facts.name,
        fix="leave it to the start check, or plan with a model of similar shape.",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' messages about kernels and patterns."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _segments(step: FakeStep, facts: ModelFacts, setup: TrainingSetup, is_exact: bool) -> tuple[Document, bool]:
    if is_exact:
        return _at(_marks(step.run(setup.micro_batch_size, setup.sequence_length))), True
    loops = _loops_over_tokens(step, facts)
    unit = _FEW if loops else _UNIT
    below = [window for window in windows_of(facts.traced_config) if window < setup.sequence_length]
    start = 1 if loops or not below else max(below) // unit + 1
    if facts.max_positions and 5 * start * unit > facts.max_positions:
        # Learned positions limit the length.
        start, unit = 1, max(1, facts.max_positions // 5)
    # Chosen so that ratios of sizes are products of different primes for every power of rows and length.
    near, far = (2, 3) if loops else (3, 5)
    points = [(1, start * unit), (2, near * start * unit), (3, far * start * unit)]
    runs = {} if loops else {point: step.run(*point) for point in points}
    if runs and len({_shape(run) for run in runs.values()}) == 1:
        found = _by_tensor(list(runs.values()), points)
        if found is not None:
            return found, False
    lengths = [length for _, length in points]
    few, many = ([_marks(runs.get((rows, n)) or step.run(rows, n)) for n in lengths] for rows in _ROWS)
    found = _by_mark(few, many, lengths)
    last = 4 * start * unit
    mark = _marks(step.run(2, last))
    if _is_right(found, mark, (2, last)):
        return found, False
    if loops:
        # The runs are too short for a curve, so extrapolate linearly from the two longest.
        more = _marks(step.run(3, last))
        few, many = ([*marks[2:], then, _onward(marks[2], then)] for marks, then in ((few, mark), (many, more)))
        return _by_mark(few, many, (lengths[2], last, 2 * last - lengths[2])), False
    return _at(_marks(step.run(setup.micro_batch_size, setup.sequence_length))), True


_LOOPING: dict[str, bool] = {}


def _loops_over_tokens(step: FakeStep, facts: ModelFacts) -> bool:
    """True if the number of operations grows with the tokens, so that only few are run. Cached per model."""
    text = facts.traced_config
    if text not in _LOOPING:
        few, more = (_num_events(step.run(1, length)) for length in (_FEW, 2 * _FEW))
        _LOOPING[text] = more > 1.5 * few
    return _LOOPING[text]


def _num_events(run: dict[str, list[int]]) -> int:
    return sum(len(events) for events in run.values())


def _shape(run: dict[str, list[int]]) -> tuple[tuple[str, tuple[bool, ...]], ...]:
    return tuple((name, tuple(event > 0 for event in events)) for name, events in run.items())


def _by_tensor(runs: Sequence[dict[str, list[int]]], points: Sequence[Point]) -> Document | None:
    """Fit a polynomial to every tensor; None if one cannot be fitted."""
    found: Document = {}
    for name in runs[0]:
        if name == "head":
            continue
        events = []
        for values in zip(*(run[name] for run in runs), strict=True):
            polynomial = fitted(values, points)
            if polynomial is None:
                return None
            events.append(polynomial)
        found[name] = {"net": summed(events), "peaks": _highest(events)}
    return found


def _highest(events: Sequence[Polynomial]) -> list[Polynomial]:
    """The running sums of `events` that are the highest at some size."""
    if not events:
        return [summed(events)]
    sums = torch.tensor(events, dtype=torch.float64).cumsum(0)
    sizes = torch.tensor([powers_of(*point) for point in _GRID], dtype=torch.float64)
    highest, places = (sums @ sizes.T).max(0)
    found = sorted(set(places[highest > 0].tolist()))
    return [sums[place].tolist() for place in found] or [summed([])]


def _marks(run: dict[str, list[int]]) -> dict[str, Mark]:
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


def _is_right(found: Document, marks: dict[str, Mark], point: Point) -> bool:
    for name, (net, peaks) in marks.items():
        part, peak = found.get(name), max(peaks)
        if part is None or abs(value_of(part["net"], *point) - net) > 1e-3 * max(peak, abs(net)):
            return False
        if abs(max(value_of(polynomial, *point) for polynomial in part["peaks"]) - peak) > 1e-2 * peak:
            return False
    return True


def _at(marks: dict[str, Mark]) -> Document:
    """Constant polynomials for one size."""
    return {
        name: {"net": [net, 0, 0, 0, 0, 0], "peaks": [[max(peaks), 0, 0, 0, 0, 0]]}
        for name, (net, peaks) in marks.items()
    }
