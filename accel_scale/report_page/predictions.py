"""The planner's predictions for a run, from its records, next to what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accel_scale.report_page.figures import formatted
from accel_scale.report_page.reading import RunRecords, number, table

_MOST_TERMS = 12


@dataclass(frozen=True)
class PredictedRun:
    """Predictions and measurements of one run; None where a value was not predicted or not measured.

    Attributes:
        card: The card it was planned for.
        bytes: Predicted bytes in tensors at the peak.
        half_bytes: Half-width of the interval around `bytes`.
        seen_bytes, seen: Predicted bytes for the longest rows that occurred, and their length in words.
        limit_bytes: Memory of the card.
        step_seconds: Predicted time of an optimizer step.
        measured_bytes, measured_seconds: Measured peak bytes and step time.
        is_on_device: Whether the memory is a device's rather than the host's.
        where: Text that names the card if the prediction is for another card than the one here; else empty.
        phases: Bytes of each term in each phase of a step.
        peak_phase: The largest phase.
    """

    card: str = ""
    bytes: float | None = None
    half_bytes: float = 0.0
    seen_bytes: float | None = None
    seen: str = ""
    limit_bytes: float | None = None
    step_seconds: float | None = None
    measured_bytes: float | None = None
    measured_seconds: float | None = None
    is_on_device: bool = False
    where: str = ""
    phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    peak_phase: str = ""

    @property
    def is_there(self) -> bool:
        """True if anything was predicted."""
        return self.bytes is not None or self.step_seconds is not None

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Table rows of quantity, predicted, measured and difference."""
        pairs = [
            ("memory in tensors, peak", self.bytes, self.measured_bytes, "bytes"),
            ("step time", self.step_seconds, self.measured_seconds, "seconds"),
        ]
        rows = []
        for what, predicted, measured, unit in pairs:
            if predicted is None and measured is None:
                continue
            said = "—" if predicted is None else formatted(predicted, unit)
            if unit == "bytes" and self.half_bytes:
                said += f" ± {formatted(self.half_bytes, unit)}"
            if unit == "bytes" and self.seen and self.seen_bytes is not None:
                said += f"; {formatted(self.seen_bytes, unit)} for {self.seen}"
                predicted = self.seen_bytes
            difference = "—"
            if predicted is not None and measured:
                difference = f"{(predicted - measured) / measured:+.1%}"
            rows.append((what, said, "not measured" if measured is None else formatted(measured, unit), difference))
        return rows


def prediction_of(run: RunRecords) -> PredictedRun:
    """Read the prediction from the summary, else from the record of the last start; empty without a plan."""
    plan = table(run.summary.get("plan"))
    predicted, compared, measured = (table(plan.get(name)) for name in ("predicted", "compared", "measured"))
    seconds = number(measured.get("step_seconds"))
    if seconds is None and (points := run.series.get("step_seconds")):
        ordered = sorted(value for _, value in points)
        seconds = ordered[len(ordered) // 2]
    if not predicted:
        return PredictedRun(measured_seconds=seconds)
    allocated = number(predicted.get("allocated_bytes")) or 0.0
    device, low = (number(predicted.get(name)) or 0.0 for name in ("device_bytes", "low_bytes"))
    half = (device - low) / device * allocated if device else 0.0
    is_on_device = "allocated_bytes" in run.series
    card = str(plan.get("card", ""))
    is_elsewhere = not compared and card != "this machine's memory" and not is_on_device
    seen, full = number(measured.get("positions")), number(compared.get("positions"))
    phases = {
        str(name): {str(term): size for term, value in table(terms).items() if (size := number(value))}
        for name, terms in table(predicted.get("phases")).items()
    }
    return PredictedRun(
        card=card,
        bytes=number(compared.get("planned_bytes")) or allocated,
        half_bytes=number(compared.get("interval_bytes")) or half,
        seen_bytes=number(compared.get("allocated_bytes")),
        seen=f"{seen:,.0f} of {full:,.0f} positions" if seen and full and seen < full else "",
        limit_bytes=number(plan.get("limit_bytes")),
        step_seconds=number((compared or predicted).get("step_seconds")),
        measured_bytes=number(measured.get("allocated_bytes")),
        measured_seconds=seconds,
        is_on_device=is_on_device,
        where=f" for {card}" if is_elsewhere else "",
        phases={name: largest_terms(terms) for name, terms in phases.items()},
        peak_phase=str(predicted.get("peak_phase", "")),
    )


def largest_terms(terms: Mapping[str, float]) -> Mapping[str, float]:
    """The terms, largest first; if there are many, the small ones are summed up."""
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    kept, rest = ordered[: _MOST_TERMS - 1], ordered[_MOST_TERMS - 1 :]
    return dict([*kept, ("others", sum(size for _, size in rest))] if rest else kept)
