"""Compare plans of other stacks with the longest rows that those stacks claim to fit on cards of a given size.

    python benchmarks/stack_limits.py            # prints the table
    python benchmarks/stack_limits.py --write    # and writes benchmarks/results/stack_limits.md

The longest row that fits a card roughly fills it, so the error is the predicted device memory relative to the card's
size. The rows and their sources are in `benchmarks/data/context_limits.yaml`.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

from accel_scale import plan
from accel_scale.planning.cost.memory import predict_memory

GIB = 2**30
HERE = Path(__file__).resolve().parent
ROWS, RESULTS = HERE / "data" / "context_limits.yaml", HERE / "results" / "stack_limits.md"


class Limit(NamedTuple):
    """One published limit with the plan of such a row."""

    published_as: str
    stack: str
    model: str
    card_gib: int
    tokens: int
    predicted_gib: float
    source: str

    @property
    def error(self) -> float:
        """Signed error relative to the card's size."""
        return self.predicted_gib / self.card_gib - 1


def limits() -> list[Limit]:
    """Plan every published limit."""
    found = []
    for document in yaml.safe_load(ROWS.read_text(encoding="utf-8")):
        for row in document["rows"]:
            for card, tokens in row["tokens"].items():
                # Planned on a card that holds everything, since the prediction may exceed the published card.
                planned = plan(
                    row["model"],
                    gpu="1000GiB",
                    strategy="one GPU",
                    stack=row["stack"],
                    max_length=tokens,
                    per_device_train_batch_size=1,
                    global_batch_size=4,
                    **document["settings"],
                )
                assert planned.best is not None
                setup = planned.best.setup
                setup = replace(setup, loss=row.get("loss", setup.loss))
                size = predict_memory(planned.request.model, setup).needed_bytes / GIB
                stack = row["stack"] + (", whole logits" if "loss" in row else "")
                found.append(Limit(row["published_as"], stack, row["model"], card, tokens, size, document["source"]))
    return found


def table(found: list[Limit]) -> str:
    """Medians by publisher, then every row."""
    lines = [
        "# Plans of other stacks beside published limits",
        "",
        "`python benchmarks/stack_limits.py --write`, whose first lines say what the error is.",
        "",
        "| published for | planned as | rows | median error | smallest | largest |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row.published_as for row in found):
        chosen = [row for row in found if row.published_as == name]
        errors = [row.error for row in chosen]
        lines.append(
            f"| {name} | {chosen[0].stack} | {len(chosen)} | {statistics.median(errors):+.0%} | {min(errors):+.0%} | "
            f"{max(errors):+.0%} |"
        )
    lines += ["", "| published for | model | card, GiB | longest row | predicted, GiB | error |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    lines += [
        f"| {row.published_as} | {row.model} | {row.card_gib} | {row.tokens:,} | {row.predicted_gib:.1f} | "
        f"{row.error:+.0%} |"
        for row in found
    ]
    lines += ["", *(f"Source: {source}." for source in dict.fromkeys(row.source for row in found))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args()
    text = table(limits())
    print(text)
    if options.write:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
