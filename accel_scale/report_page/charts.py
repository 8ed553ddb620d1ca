"""The plots of a report: series, predictions, events, and a description in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel_scale.report_page.figures import formatted
from accel_scale.report_page.predictions import PredictedRun
from accel_scale.report_page.reading import Point, RunRecords, number
from accel_scale.report_page.thinning import thinned

_EVAL = "eval_"


@dataclass(frozen=True)
class ChartKind:
    """A predefined plot.

    Attributes:
        title: Text above the plot.
        names: Label of each figure of ``metrics.jsonl`` that it shows.
        unit: A unit that `formatted` knows.
        has_events: Whether to mark the guard's events.
        about: Text next to the title.
    """

    title: str
    names: Mapping[str, str]
    unit: str = "number"
    has_events: bool = False
    about: str = ""


KINDS: tuple[ChartKind, ...] = (
    ChartKind("Loss", {"loss": "training", "eval_loss": "validation"}, has_events=True),
    ChartKind("Reward", {"reward": "mean reward"}),
    ChartKind("Pairs preferred", {"rewards/accuracies": "training", "eval_rewards/accuracies": "validation"}, "share"),
    ChartKind("Learning rate", {"learning_rate": "learning rate"}),
    ChartKind("Gradient norm", {"grad_norm": "before clipping"}, has_events=True),
    ChartKind("Speed", {"tokens_per_second": "tokens/s"}, "rate", about="of all ranks, without padding"),
    ChartKind("Waiting for data", {"data_wait_ratio": "share of the time"}, "share"),
    ChartKind("Step time", {"step_seconds": "measured"}, "seconds"),
    ChartKind("Device memory", {"allocated_bytes": "allocated at most so far", "reserved_bytes": "reserved"}, "bytes"),
    ChartKind("Host memory", {"host_bytes": "resident, rank 0"}, "bytes"),
)
# Counters and times that are not worth plotting.
_UNDRAWN = {
    *("epoch", "tokens", "num_tokens", "rows", "skipped_loss", "skipped_grad_norm", "skipped_steps", "step_time"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens", "total_flos"),
}
_SHARES = ("accuracy", "accuracies", "ratio", "frac_", "mfu")


@dataclass(frozen=True)
class Series:
    """One line of a plot."""

    label: str
    run: int
    points: Sequence[Point]
    dashed: bool = False
    only_points: bool = False


@dataclass(frozen=True)
class ConstantLine:
    """A value that holds for all steps, with its interval if it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Mark:
    """An event at a step: ``guard`` or ``start``."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True)
class Chart:
    """One plot."""

    title: str
    unit: str
    series: Sequence[Series]
    levels: Sequence[ConstantLine] = ()
    marks: Sequence[Mark] = ()
    about: str = ""
    is_more: bool = False
    words: Sequence[str] = ()

    @property
    def is_log(self) -> bool:
        """True if the values span a range so wide that a linear axis would show only the largest."""
        values = [value for line in self.series for _, value in line.points]
        return self.title == "Gradient norm" and min(values) > 0 and max(values) / min(values) > 50


def charts_of(runs: Sequence[RunRecords], labels: Sequence[str], predictions: Sequence[PredictedRun]) -> list[Chart]:
    """The charts that have something to show, predefined ones first."""
    kinds = [*((kind, False) for kind in KINDS), *((kind, True) for kind in _others(runs))]
    charts = []
    for kind, is_more in kinds:
        several = sum(any(name in run.series for run in runs) for name in kind.names) > 1
        lines = (_series_of(kind, run, at, labels, has_several=several) for at, run in enumerate(runs))
        series = [line for found in lines for line in found]
        if not series:
            continue
        levels = [level for prediction in predictions for level in _levels(kind, prediction)] if len(runs) == 1 else []
        marks = [mark for run in runs for mark in _marks(kind, run)] if len(runs) == 1 else []
        if kind.has_events and "grad_norm" in kind.names and len(runs) == 1:
            series += _untaken(runs[0])
        words = [_in_words(line, kind.unit) for line in series if not line.only_points]
        charts.append(Chart(kind.title, kind.unit, series, levels, marks, kind.about, is_more, words))
    return charts


def as_json(chart: Chart, most_points: int) -> dict[str, object]:
    """The chart for the page's script, with values rounded to the digits that a plot can show."""
    return {
        "title": chart.title,
        "unit": chart.unit,
        "log": chart.is_log,
        "series": [
            {
                "label": line.label,
                "run": line.run,
                "dashed": line.dashed,
                "points": line.only_points,
                "x": [step for step, _ in points],
                "y": [float(f"{value:.6g}") for _, value in points],
            }
            for line in chart.series
            if (points := thinned(line.points, most_points))
        ],
        "levels": [vars(level) for level in chart.levels],
        "marks": [vars(mark) for mark in chart.marks],
    }


def _others(runs: Iterable[RunRecords]) -> list[ChartKind]:
    """A plot for every figure without a predefined one, with validation next to training."""
    known = {name for kind in KINDS for name in kind.names} | _UNDRAWN
    names = dict.fromkeys(name for run in runs for name in run.series if name not in known)
    bare = dict.fromkeys(name.removeprefix(_EVAL) for name in names)
    kinds = []
    for name in bare:
        both = {name: "training", _EVAL + name: "validation"}
        unit = "share" if any(part in name for part in _SHARES) else "number"
        kinds.append(ChartKind(name.replace("_", " "), {each: both[each] for each in both if each in names}, unit))
    return kinds


def _series_of(kind: ChartKind, run: RunRecords, at: int, labels: Sequence[str], *, has_several: bool) -> list[Series]:
    found = []
    for position, (name, words) in enumerate(kind.names.items()):
        points = run.series.get(name)
        if points:
            label = words if len(labels) == 1 else labels[at] + (f", {words}" if has_several else "")
            found.append(Series(label, at, points, dashed=position > 0))
    return found


def _untaken(run: RunRecords) -> list[Series]:
    """Gradient norms of the steps that have a guard event."""
    norms = [(number(event.get("step")), number(event.get("grad_norm"))) for event in run.events]
    points = [(int(step), norm) for step, norm in norms if step is not None and norm is not None and norm > 0]
    return [Series("of steps with an event", 0, points, only_points=True)] if points else []


def _levels(kind: ChartKind, prediction: PredictedRun) -> list[ConstantLine]:
    found = []
    if "step_seconds" in kind.names and prediction.step_seconds is not None:
        found.append(ConstantLine(f"predicted{prediction.where}", prediction.step_seconds))
    is_memory = "allocated_bytes" in kind.names or ("host_bytes" in kind.names and not prediction.is_on_device)
    if is_memory and prediction.bytes is not None:
        what = "predicted" if prediction.is_on_device else "predicted for tensors"
        half = prediction.half_bytes
        found.append(
            ConstantLine(
                f"{what}{prediction.where}", prediction.bytes, prediction.bytes - half, prediction.bytes + half
            )
        )
        if not prediction.is_on_device and prediction.measured_bytes is not None:
            found.append(ConstantLine("measured for tensors", prediction.measured_bytes))
        if prediction.is_on_device and prediction.limit_bytes is not None:
            found.append(ConstantLine(f"memory of the card, {prediction.card}", prediction.limit_bytes))
    return found


def _marks(kind: ChartKind, run: RunRecords) -> list[Mark]:
    marks = [
        Mark("start", start.step, f"start {at + 1} of the run, from step {start.step:,}")
        for at, start in enumerate(run.starts)
        if at > 0
    ]
    if kind.has_events:
        for event in run.events[:200]:
            step = int(number(event.get("step")) or 0)
            marks.append(Mark("guard", step, f"guard, step {step:,}: {event.get('action')}, {event.get('reason')}"))
    return marks


def _in_words(line: Series, unit: str) -> str:
    values = [value for _, value in line.points]
    low, high = min(values), max(values)
    first, last = (formatted(values[at], unit) for at in (0, -1))
    steps = f"{len(values):,} values, steps {line.points[0][0]:,} to {line.points[-1][0]:,}"
    if len(values) == 1:
        return f"{line.label}: {first} at step {line.points[0][0]:,}."
    at_low, at_high = (line.points[values.index(value)][0] for value in (low, high))
    return (
        f"{line.label}: {first} → {last} ({steps}); lowest {formatted(low, unit)} at step {at_low:,}, highest "
        f"{formatted(high, unit)} at step {at_high:,}."
    )
