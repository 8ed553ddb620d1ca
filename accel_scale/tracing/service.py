"""What the planner asks of real classes: facts, and bytes of a step as polynomials of rows and length."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import Document
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.traced.polynomials import Point, fitted, highest, interpolated, summed, value_of
from accel_scale.planning.traced.steps import windows_of
from accel_scale.tracing.facts import read_facts
from accel_scale.tracing.skeletons import not_built
from accel_scale.tracing.step import FakeStep

__all__ = ["facts_of", "traced_fit"]

_GRID = [(rows, 2**power) for power in range(6, 19, 2) for rows in (1, 8, 64)]
# Lengths are multiples of this, which chunks of state-space layers divide.
_UNIT = 256
# A model that loops over tokens runs only so many of them.
_FEW = 32


def facts_of(values: Mapping[str, object], *, name: str, place: str) -> ModelFacts:
    """Shapes and parameters of the model that transformers builds from a ``config.json``.

    Raises:
        ConfigError: if it cannot build it.
    """
    try:
        with _quiet():
            return read_facts(values, name=name, place=place)
    except ConfigError:
        raise
    except Exception as error:  # of the model's own code
        raise not_built(str(values.get("model_type")), place, error) from None


def traced_fit(facts: ModelFacts, setup: TrainingSetup, *, is_cuda: bool, is_tracked: bool) -> Document:
    """Bytes of a step of a few layers, by segment, for every number of rows and length.

    Of each segment ``net`` is what it leaves, ``peaks`` are what is the highest at some size. ``exact`` says that the
    model's tensors follow no polynomial, and the fit is of this number of rows and this length alone.

    Raises:
        ConfigError: if the model cannot take the step.
    """
    try:
        with _quiet():
            step = FakeStep(facts, setup, is_cuda=is_cuda, is_tracked=is_tracked)
            try:
                segments, exact = _segments(step, facts, setup)
            except Exception:  # layers that cannot do without the others
                step = FakeStep(facts, setup, is_cuda=is_cuda, is_tracked=is_tracked, is_whole=True)
                segments, exact = _segments(step, facts, setup)
    except ConfigError:
        raise
    except Exception as error:  # of the model's own code
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConfigError(
            f"{facts.model_type!r} takes no step without weights ({type(error).__name__}: {reason}).",
            place=facts.name,
            fix="leave it to the start check, or plan with a model of similar shape.",
        ) from None
    return {
        "segments": segments,
        "stands_for": step.stands_for,
        "kinds": step.kinds,
        "hidden_bytes": step.hidden_bytes,
        "hidden_size": facts.hidden_size,
        "exact": exact,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, libraries keep to themselves what they say about kernels and patterns."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _segments(step: FakeStep, facts: ModelFacts, setup: TrainingSetup) -> tuple[Document, bool]:
    loops = _loops_over_tokens(step, facts)
    unit = _FEW if loops else _UNIT
    below = [window for window in windows_of(facts.traced_config) if window < setup.sequence_length]
    start = 1 if loops or not below else max(below) // unit + 1
    if facts.max_positions and 5 * start * unit > facts.max_positions:
        # Learned positions end there.
        start, unit = 1, max(1, facts.max_positions // 5)
    # Ratios of the sizes are products of different primes for every power of rows and length.
    points = [(1, start * unit), (2, 3 * start * unit), (3, 5 * start * unit)]
    if not loops:
        runs = [step.run(*point) for point in points]
        if len({_shape(run) for run in runs}) == 1 and (found := _by_tensor(runs, points)) is not None:
            return found, False
    lengths = (start * unit, (start + 1) * unit, (start + 2) * unit)
    found = _by_mark([_marks(step.run(rows, length)) for rows in (1, 2) for length in lengths], lengths)
    last = (3, (start + 4) * unit)
    if loops or _is_right(found, _marks(step.run(*last)), last):
        return found, False
    return _at(_marks(step.run(setup.micro_batch_size, setup.sequence_length))), True


_MOST_EVENTS = 800
_LOOPING: dict[str, bool] = {}


def _loops_over_tokens(step: FakeStep, facts: ModelFacts) -> bool:
    """Whether more tokens are more operations; then few of them are run. Asked once for a model."""
    text = facts.traced_config
    if text not in _LOOPING:
        few = _num_events(step.run(1, _FEW))
        # A loop over 32 tokens shows: without one a layer has a few hundred events.
        is_suspect = few > _MOST_EVENTS * len(step.chosen or [0])
        _LOOPING[text] = is_suspect and _num_events(step.run(1, 2 * _FEW)) > 1.5 * few
    return _LOOPING[text]


def _num_events(run: dict[str, list[int]]) -> int:
    return sum(len(events) for events in run.values())


def _shape(run: dict[str, list[int]]) -> tuple[tuple[str, tuple[bool, ...]], ...]:
    return tuple((name, tuple(event > 0 for event in events)) for name, events in run.items())


def _by_tensor(runs: Sequence[dict[str, list[int]]], points: Sequence[Point]) -> Document | None:
    """Every tensor's own polynomial; None where one has none."""
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
        found[name] = {"net": summed(events), "peaks": highest(events, _GRID)}
    return found


def _marks(run: dict[str, list[int]]) -> dict[str, tuple[float, float]]:
    """What each segment leaves, and its highest point."""
    found = {}
    for name, events in run.items():
        total = peak = 0
        for event in events:
            total += event
            peak = max(peak, total)
        found[name] = (float(total), float(peak))
    found.pop("head", None)
    return found


def _by_mark(marks: Sequence[dict[str, tuple[float, float]]], lengths: tuple[int, int, int]) -> Document:
    """Polynomials of each segment's marks, where tensors come in numbers that depend on the length."""
    found: Document = {}
    for name in marks[0]:
        net, peak = (interpolated([mark.get(name, (0.0, 0.0))[k] for mark in marks], lengths) for k in (0, 1))
        found[name] = {"net": net, "peaks": [peak]}
    return found


def _is_right(found: Document, marks: dict[str, tuple[float, float]], point: Point) -> bool:
    for name, (net, peak) in marks.items():
        part = found.get(name)
        if part is None or abs(value_of(part["net"], *point) - net) > 1e-3 * max(peak, abs(net)):
            return False
        if abs(value_of(part["peaks"][0], *point) - peak) > 1e-2 * peak:
            return False
    return True


def _at(marks: dict[str, tuple[float, float]]) -> Document:
    """Of one size."""
    return {
        name: {"net": [net, 0, 0, 0, 0, 0], "peaks": [[peak, 0, 0, 0, 0, 0]]} for name, (net, peak) in marks.items()
    }
