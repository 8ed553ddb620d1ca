"""Memory as stacked bars: the terms on a card next to the card's capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel_scale.board.rendering import filled
from accel_scale.planning.search.plan import Candidate
from accel_scale.report_page.predictions import largest_terms
from accel_scale.reporting.plan_terms import gpu_rows

_WIDTH = 1000.0
# From left to right. Each term keeps its colour in every picture; unlisted terms come last.
_ORDER = (
    "weights", "activations and loss", "gradients", "optimizer states", "master weights", "gathered weights",
    "communication buckets", "lost by the allocator", "CUDA context", "NCCL", "unreduced gradients", "others",
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: Text next to the bar.
        parts: Bytes of each term.
        low, high: Interval around their sum; None if there is none.
        is_peak: Whether this is the largest phase of a step.
    """

    label: str
    parts: Mapping[str, float]
    low: float | None = None
    high: float | None = None
    is_peak: bool = False

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def on_card(candidate: Candidate, label: str) -> Bar:
    """Memory of a setting on a card at its peak, including everything besides tensors."""
    memory = candidate.memory
    parts = {name: size for name, size in memory.peak_phase.terms if size}
    beside = {name.removeprefix("+ "): size for name, size in gpu_rows(candidate).items() if name.startswith("+ ")}
    return Bar(label, largest_terms({**parts, **beside}), memory.low_bytes, memory.high_bytes)


def phases(candidate: Candidate) -> list[Bar]:
    """One bar for each phase of a setting's step, tensors only."""
    memory = candidate.memory
    return [
        Bar(phase.name, largest_terms(dict(phase.terms)), is_peak=phase is memory.peak_phase)
        for phase in memory.phases
    ]


def drawn(bars: Sequence[Bar], *, title: str, limit: float | None = None) -> str:
    """The bars, their legend, and the same numbers as a table."""
    found = dict.fromkeys(term for bar in bars for term, size in bar.parts.items() if size)
    terms = sorted(found, key=_colour)
    widest = max([limit or 0.0, *(bar.high or bar.total for bar in bars)], default=1.0) * 1.02 or 1.0
    return filled(
        "bars",
        title=title,
        bars=[(bar, list(_pieces(bar, terms, widest)), _span(bar, widest)) for bar in bars],
        terms=[(term, _colour(term)) for term in terms],
        limit=limit,
        limit_x=None if limit is None else _WIDTH * limit / widest,
    )


def _pieces(bar: Bar, terms: Sequence[str], widest: float) -> Iterable[tuple[int, str, float, float, float]]:
    """Colour, term, bytes, left edge and width of each part."""
    left = 0.0
    for term in terms:
        if size := bar.parts.get(term, 0.0):
            width = _WIDTH * size / widest
            yield _colour(term), term, size, left, width
            left += width


def _colour(term: str) -> int:
    return _ORDER.index(term) if term in _ORDER else len(_ORDER)


def _span(bar: Bar, widest: float) -> tuple[float, float] | None:
    if bar.low is None or bar.high is None:
        return None
    return _WIDTH * bar.low / widest, _WIDTH * bar.high / widest
