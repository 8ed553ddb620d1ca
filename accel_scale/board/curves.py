"""A run's curves as scalable pictures: the charts of its report, drawn on the server because they change live."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from accel_scale.report_page.charts import Chart, Series, charts_of
from accel_scale.report_page.figures import formatted, labels_of
from accel_scale.report_page.predictions import prediction_of
from accel_scale.report_page.reading import RunRecords
from accel_scale.report_page.thinning import thinned

_MOST_POINTS = 400
_TICKS = 4


@dataclass(frozen=True)
class Tick:
    """A label on an axis.

    Attributes:
        share: Position along the axis, from 0 at its start to 1 at its end.
        text: The label.
    """

    share: float
    text: str


@dataclass(frozen=True)
class Line:
    """One series, ready to be drawn into a square of 1000 by 1000.

    Attributes:
        label: Its name.
        last: Its last value.
        path: Path data of an SVG.
        dashed: Whether it is dashed, as in the report.
    """

    label: str
    last: str
    path: str
    dashed: bool


@dataclass(frozen=True)
class Picture:
    """A chart, ready to be drawn.

    Attributes:
        title, about: Text above the chart.
        lines: Its series.
        levels: Constant values as label, value, and share of the height.
        marks: Events as kind, text and share of the width.
        across, up: Labels of the horizontal and vertical axis.
        words: A description of the chart in words.
    """

    title: str
    about: str
    lines: Sequence[Line]
    levels: Sequence[tuple[str, str, float]]
    marks: Sequence[tuple[str, str, float]]
    across: Sequence[Tick]
    up: Sequence[Tick]
    words: Sequence[str]


def pictures_of(run: RunRecords) -> list[Picture]:
    """The charts of a run's report, except those of unnamed figures."""
    charts = charts_of([run], labels_of([run]), [prediction_of(run)])
    return [_picture(chart) for chart in charts if not chart.is_more]


def _picture(chart: Chart) -> Picture:
    drawn = [line for line in chart.series if not line.only_points]
    steps = [step for line in drawn for step, _ in line.points]
    first, last = min(steps), max(steps)
    levels = [level for level in chart.levels if level.value <= 4 * max(_values(drawn))]
    low, high = _extent([*_values(drawn), *(level.value for level in levels)], chart)

    def across(step: float) -> float:
        return 0.5 if last == first else (step - first) / (last - first)

    def up(value: float) -> float:
        scale = math.log if chart.is_log else float
        return (scale(value) - scale(low)) / (scale(high) - scale(low))

    return Picture(
        chart.title,
        chart.about,
        [
            Line(line.label, formatted(line.points[-1][1], chart.unit), _path(line, across, up), line.dashed)
            for line in drawn
        ],
        [(level.label, formatted(level.value, chart.unit), up(level.value)) for level in levels],
        [(mark.kind, mark.text, across(mark.step)) for mark in chart.marks if first <= mark.step <= last],
        [Tick(across(step), f"{step:,.0f}") for step in _round_steps(first, last)],
        [Tick(up(value), formatted(value, chart.unit)) for value in _ticks(low, high, chart)],
        chart.words,
    )


def _values(series: Iterable[Series]) -> list[float]:
    return [value for line in series for _, value in line.points]


def _path(line: Series, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    points = [(1000 * across(step), 1000 - 1000 * up(value)) for step, value in thinned(line.points, _MOST_POINTS)]
    if len(points) == 1:
        x, y = points[0]
        points = [(x - 8, y), (x + 8, y)]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _extent(values: Sequence[float], chart: Chart) -> tuple[float, float]:
    low, high = min(values), max(values)
    if chart.is_log:
        return low / 1.3, high * 1.3
    begins_at_0 = chart.unit != "number" and low >= 0
    room = ((high if begins_at_0 else high - low) or abs(high) or 1.0) * 0.06
    return (0.0 if begins_at_0 else low - room), high + room


def _ticks(low: float, high: float, chart: Chart) -> list[float]:
    if chart.is_log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers] if len(powers) > 1 else [low * 1.3, high / 1.3]
    unit = 1024.0 ** max(0, int(math.log(max(high, 1.0), 1024))) if chart.unit == "bytes" else 1.0
    return [value * unit for value in _round(low / unit, high / unit)]


def _round_steps(first: int, last: int) -> list[float]:
    return [step for step in _round(first, last) if step == int(step)] if last > first else [float(first)]


def _round(low: float, high: float) -> list[float]:
    """About `_TICKS` round values between `low` and `high`."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
