"""Measure how well links fitted by `accel-scale comm --measure` predict gloo on CPU processes at held-out sizes.

    python benchmarks/comm_gloo.py            # 2 and 4 processes, writes benchmarks/results/comm_gloo.md

Every other size is fitted (least squares of the relative error), the others are held out. In addition to the saved
links, one per operation, two simpler ones are judged on the same held-out sizes: links without a knee, and one latency
and bandwidth for all operations together.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_scale.cli.comm_cluster import parse_sizes
from accel_scale.cli.comm_measure import links_of
from accel_scale.launching.local_processes import run_locally
from accel_scale.measuring.collective_runs import DEFAULT_REPEATS, FASTEST_SHARE, measure_levels
from accel_scale.network.collectives import OPS, USUAL, Link, steps
from accel_scale.network.link_fit import FittedLink, MeasuredLinks, Sample, fit_pairs, worst_and_median
from accel_scale.reporting.comm_tables import format_short, gigabytes

RESULT = Path(__file__).parent / "results" / "comm_gloo.md"
SIZES = "4KiB..16MiB"
BOUND = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", default=SIZES)
    parser.add_argument("--repeats", type=int, default=DEFAULT_REPEATS)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    sizes = parse_sizes([args.size], "2")
    parts = []
    for processes in args.processes:
        before = os.getloadavg()[0]
        found = run_locally(measure_levels, processes, "gloo", OPS, sizes, args.repeats)
        links = links_of(found)
        parts.append(section(links, processes, load=max(before, os.getloadavg()[0])))
        print(parts[-1], flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join([header(args, links), *parts]), encoding="utf-8")
    print(f"written {args.output}")


def header(args: argparse.Namespace, links: MeasuredLinks) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    return f"""# Collectives over gloo: fitted links on sizes they have not seen

`python benchmarks/comm_gloo.py --processes {" ".join(map(str, args.processes))} --size {args.size} \
--repeats {args.repeats}`, {datetime.now(UTC):%Y-%m-%d}, commit {commit or "unknown"}, torch \
{(links.versions or {})["torch"]}, Python {platform.python_version()}, {links.device}.

Processes of one machine over the loopback interface, one thread each, fp32. A time is the mean of the
fastest {FASTEST_SHARE:.0%} of up to {args.repeats} batches of calls, the slowest rank of each: what else a machine
does only adds time. Every other size is fitted, the errors are those of the other ones. *Off by* is predicted ÷
measured − 1.
"""


def section(links: MeasuredLinks, processes: int, *, load: float) -> str:
    fits = list(links.inside.values())
    errors = [error for fit in fits for error in fit.errors()]
    median, worst = worst_and_median(fits) or (0.0, 0.0)
    within = sum(error <= BOUND for error in errors)
    lines = [
        f"## {processes} processes",
        "",
        f"Held out sizes: **median error {median:.1%}, worst {worst:.1%}**; {within} of {len(errors)} within "
        f"{BOUND:.0%}. Load average of the machine up to {load:.1f}.",
        "",
        "| link | median error | worst |",
        "|---|---:|---:|",
        f"| each operation, with a knee where it pays (saved) | {median:.1%} | {worst:.1%} |",
    ]
    for name, simpler in (
        ("each operation, α and β only", without_knees(fits)),
        ("one α and β for all", shared(fits)),
    ):
        middle, most = worst_and_median(simpler) or (0.0, 0.0)
        lines.append(f"| {name} | {middle:.1%} | {most:.1%} |")
    lines += ["", *fit_table(fits), "", *size_table(fits), ""]
    return "\n".join(lines)


def without_knees(fits: list[FittedLink]) -> list[FittedLink]:
    return [refitted(fit, fitted_link([fit])) for fit in fits]


def shared(fits: list[FittedLink]) -> list[FittedLink]:
    link = fitted_link(fits)
    return [refitted(fit, link) for fit in fits]


def fitted_link(fits: list[FittedLink]) -> Link:
    """One latency and bandwidth for the fitted sizes of all of `fits`."""
    chosen = [(fit, s) for fit in fits for s in fit.samples if s.num_bytes in fit.fitted_bytes]
    paths = [steps(fit.op, USUAL[fit.op], s.num_bytes, s.workers) for fit, s in chosen]
    return fit_pairs([(p.messages, p.num_bytes) for p in paths], [s.seconds for _, s in chosen])


def refitted(fit: FittedLink, link: Link) -> FittedLink:
    return FittedLink(fit.op, fit.algorithm, fit.workers, link, fit.fitted_bytes, fit.samples)


def fit_table(fits: list[FittedLink]) -> list[str]:
    lines = [
        "| op | formula | latency of a message | GB/s | up to (bytes sent) | GB/s beyond | median error | worst |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for fit in fits:
        median, worst = worst_and_median([fit]) or (0.0, 0.0)
        link = fit.link
        knee = "" if link.knee_bytes is None else f"{link.knee_bytes / 2**20:.3g} MiB"
        cells = (format_short(link.latency_seconds), gigabytes(link.bytes_per_second), knee)
        beyond = gigabytes(link.bytes_per_second_beyond)
        lines.append(f"| {fit.op} | {fit.algorithm} | {' | '.join(cells)} | {beyond} | {median:.1%} | {worst:.1%} |")
    return lines


def size_table(fits: list[FittedLink]) -> list[str]:
    """Table of algbw, busbw and the fit's prediction for held-out sizes."""
    lines = [
        "| op | size | time | algbw GB/s | busbw GB/s | predicted | off by |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for fit in fits:
        lines += [row(fit, sample) for sample in fit.held_out]
    return lines


def row(fit: FittedLink, sample: Sample) -> str:
    predicted = fit.predicted_seconds(sample.num_bytes)
    cells: list[Any] = [fit.op, f"{sample.num_bytes / 1024:,.0f} KiB", format_short(sample.seconds)]
    cells += [gigabytes(sample.algorithm_bandwidth), gigabytes(sample.bus_bandwidth), format_short(predicted)]
    return "| " + " | ".join(map(str, [*cells, f"{predicted / sample.seconds - 1:+.1%}"])) + " |"


if __name__ == "__main__":
    main()
