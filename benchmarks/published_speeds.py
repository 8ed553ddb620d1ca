"""Measure the error of predicted step times on published speeds.

    python benchmarks/published_speeds.py            # prints the table
    python benchmarks/published_speeds.py --write    # and writes results/published_speeds.md and its JSON

Rows are those of benchmarks/data/memory_measurements.json that state a speed. 83 of them were used to fit
`Efficiency`, so this shows how well one set of constants describes all of them, not how well it predicts new ones.
Errors are of seconds per step, relative to the measured value; *inside*: the measured value is in the interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from published_rows import HF_STACKS, load_rows, published_row

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.planning.cost.efficiency import EFFICIENCY
from accel_scale.planning.cost.timing import predict_time

RESULTS = Path(__file__).parent / "results" / "published_speeds.md"
# The rows' names for cards that have several versions.
_CARDS = {"A100": "A100 80GB SXM", "A100 80GB": "A100 80GB SXM", "H100 SXM 96GB HBM2e 500W": "H100 SXM"}
# 400 Gb/s for each of a server's eight cards, as in Meta's and Whitefiber's clusters.
_NETWORK_BYTES_PER_SECOND = 8 * 400e9 / 8
_NOT_MODELLED = ("mxfp8", "nvfp4")


def speeds_of(row: dict[str, Any]) -> tuple[str, float, float, bool]:
    """Source, measured and predicted seconds per step, and whether the interval holds the measured value.

    Raises:
        ConfigError: if the row lacks what a prediction needs, or uses something that is not modelled.
    """
    if "power limited" in row["gpu"]:
        raise ConfigError(f"row {row['id']} was measured with less power than the card's.")
    if any(word in f"{row['notes']} {row['dtype']}".lower() for word in _NOT_MODELLED):
        raise ConfigError(f"row {row['id']} multiplies in a format that is not modelled.")
    if row["packing"] is None and row["stack"] == "torchtune":
        raise ConfigError(f"row {row['id']} does not state the lengths of its padded rows.")
    published = published_row(row)
    setup = published.setup
    if "float8" in f"{row['notes']}":
        setup = replace(setup, precision="fp8")
    ranks = setup.parallel.num_gpus
    machine = Machine(
        find_gpu(_CARDS.get(row["gpu"], row["gpu"])),
        num_gpus=ranks,
        internode_bytes_per_second=_NETWORK_BYTES_PER_SECOND if ranks > 8 else None,
    )
    # transformers' checkpointing was reentrant then, which has no hooks around saved tensors.
    efficiency = replace(EFFICIENCY, checkpointed_passes=1.0) if row["stack"] in HF_STACKS else EFFICIENCY
    found = predict_time(published.model, setup, machine, efficiency=efficiency)
    share = ranks if "per GPU" in (row["tokens_per_s_scope"] or "") else 1
    measured = setup.tokens_per_step / (row["tokens_per_s"] * share)
    is_inside = found.low_seconds <= measured <= found.high_seconds
    return published.source, measured, found.step_seconds, is_inside


def summary(rows: Sequence[tuple[float, float, bool]]) -> dict[str, float]:
    """Figures of some rows of measured seconds, predicted seconds, and inside or not."""
    errors = [predicted / measured - 1 for measured, predicted, _ in rows]
    return {
        "rows": len(rows),
        "median_error": round(statistics.median(map(abs, errors)), 4),
        "bias": round(statistics.median(errors), 4),
        "inside": round(sum(is_inside for *_, is_inside in rows) / len(rows), 4),
    }


def scoreboard() -> dict[str, Any]:
    """Figures of every source and of all rows, and why rows could not be asked."""
    groups: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    refused = []
    for row in load_rows():
        if not row["tokens_per_s"]:
            continue
        try:
            source, *figures = speeds_of(row)
        except ConfigError as error:
            refused.append(error.problem)
            continue
        groups[source].append(tuple(figures))  # type: ignore[arg-type]
    every = [row for rows in groups.values() for row in rows]
    return {
        "sources": {source: summary(rows) for source, rows in groups.items()},
        "all": summary(every),
        "refused": refused,
    }


def markdown(board: dict[str, Any]) -> str:
    """The scoreboard as a page."""
    lines = [
        "# Step times on published speeds",
        "",
        "Made by `python benchmarks/published_speeds.py --write`, whose first lines say what the columns mean.",
        "",
        "| source | rows | median error | bias | inside |",
        "|---|---:|---:|---:|---:|",
    ]
    for source, f in (*board["sources"].items(), ("**all of them**", board["all"])):
        lines.append(f"| {source} | {f['rows']} | {f['median_error']:.1%} | {f['bias']:+.1%} | {f['inside']:.0%} |")
    lines += ["", "## Rows that cannot be asked", "", *(f"- {text}" for text in board["refused"])]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the page and its JSON.")
    options = parser.parse_args(argv)
    board = scoreboard()
    print(markdown(board))
    if options.write:
        RESULTS.write_text(markdown(board))
        RESULTS.with_suffix(".json").write_text(json.dumps(board, indent=1) + "\n")


if __name__ == "__main__":
    main()
