"""Tables of collectives: predicted, measured next to predicted, links, and bucket sizes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accel_scale.units import format_bytes, three_digits

if TYPE_CHECKING:
    from accel_scale.network.link_fit import FittedLink, MeasuredLinks
    from accel_scale.planning.cost.links import NamedLink, Prediction


def format_short(seconds: float) -> str:
    """``1.24 s``, ``13.2 ms`` or ``48 µs``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def gigabytes(bytes_per_second: float | None) -> str:
    """GB/s with three digits."""
    return "" if bytes_per_second is None else three_digits(bytes_per_second / 1e9)


def print_predictions(title: str, groups: Sequence[Sequence[Prediction]], notes: Sequence[str]) -> None:
    """Print one group per operation and size, the fastest entry first and marked."""
    table = _table(title, ("op", "size", "algorithm"), ("time", "sent per worker", "algbw GB/s", "busbw GB/s", ""))
    for index, group in enumerate(groups):
        if index:
            table.add_section()
        for place, entry in enumerate(group):
            first = place == 0
            table.add_row(
                entry.op if first else "",
                format_bytes(entry.num_bytes) if first else "",
                entry.algorithm,
                format_short(entry.seconds),
                format_bytes(entry.bytes_per_worker),
                gigabytes(entry.algorithm_bandwidth),
                gigabytes(entry.bus_bandwidth),
                "best" if first else "",
            )
    _print(table, notes)


def prediction_dict(entry: Prediction, *, is_best: bool) -> dict[str, Any]:
    """A prediction for ``--json``."""
    return {
        **asdict(entry),
        "algorithm_bandwidth": entry.algorithm_bandwidth,
        "bus_bandwidth": entry.bus_bandwidth,
        "best": is_best,
    }


def print_links(links: Sequence[NamedLink]) -> None:
    """Print the catalogue of links."""
    right = ("GB/s one way", "Gbit/s both ways", "GB/s reached", "latency")
    table = _table("Links: of a GPU, networks of a server", ("link",), right)
    for entry in links:
        table.add_row(
            entry.name,
            gigabytes(entry.peak_bytes_per_second),
            f"{2 * 8 * entry.peak_bytes_per_second / 1e9:,.0f}",
            gigabytes(entry.link.bytes_per_second),
            format_short(entry.link.latency_seconds),
        )
    _print(table, ())


def print_measured(links: MeasuredLinks) -> None:
    """Print every size next to the fit, then the fits with their errors on held-out sizes."""
    for name, fits in (("inside a server", links.inside), ("between servers", links.between)):
        if fits:
            workers = next(iter(fits.values())).workers
            _print(_measurements(f"{links.backend} on {workers} workers {name}", list(fits.values())), ())
            _print(_fits(f"Fit, {name}", list(fits.values())), ())


def _measurements(title: str, fits: Sequence[FittedLink]) -> Any:
    right = ("time", "median", "algbw GB/s", "busbw GB/s", "predicted", "off by", "")
    table = _table(title, ("op", "size"), right)
    for index, fit in enumerate(fits):
        if index:
            table.add_section()
        for place, sample in enumerate(fit.samples):
            predicted = fit.predicted_seconds(sample.num_bytes)
            table.add_row(
                fit.op if place == 0 else "",
                format_bytes(sample.num_bytes),
                format_short(sample.seconds),
                format_short(sample.median_seconds),
                gigabytes(sample.algorithm_bandwidth),
                gigabytes(sample.bus_bandwidth),
                format_short(predicted),
                f"{predicted / sample.seconds - 1:+.0%}",
                "fitted" if sample.num_bytes in fit.fitted_bytes else "held out",
            )
    return table


def _fits(title: str, fits: Sequence[FittedLink]) -> Any:
    from accel_scale.network.link_fit import worst_and_median

    right = ("latency", "GB/s", "up to", "GB/s beyond", "median error", "worst, held out")
    table = _table(title, ("op", "algorithm"), right)
    for fit in fits:
        error, link = worst_and_median([fit]), fit.link
        table.add_row(
            fit.op,
            fit.algorithm,
            format_short(link.latency_seconds),
            gigabytes(link.bytes_per_second),
            "" if link.knee_bytes is None else format_bytes(link.knee_bytes),
            gigabytes(link.bytes_per_second_beyond),
            "" if error is None else f"{error[0]:.0%}",
            "" if error is None else f"{error[1]:.0%}",
        )
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, pad_edge=False)
    for name in left:
        table.add_column(name, style="cyan", no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print(table: Any, notes: Sequence[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    title, table.title = table.title, None  # a table title is cut to the table's width, a printed line is not
    console.print(title, style="bold", soft_wrap=True, markup=False)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
