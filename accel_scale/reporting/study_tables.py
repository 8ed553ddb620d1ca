"""A study on the console: one line per trial while it runs, a table of trials at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from accel_scale.units import format_bytes

_MAX_ROWS = 20


def trial_line(row: Mapping[str, Any], flags: Sequence[str], metric: str) -> str:
    """``trial 3: pruned at step 12, eval_loss 1.31, 17.2 s; learning_rate=0.0004 …``."""
    step = f" at step {row['last_step']}" if row["last_step"] is not None and row["outcome"] != "complete" else ""
    parts = [f"{row['outcome']}{step}"]
    if row["value"] is not None:
        parts.append(f"{metric} {row['value']:.5g}")
    if row["seconds"] is not None:
        parts.append(f"{row['seconds']:.0f} s")
    values = " ".join(f"{flag}={short(row[flag])}" for flag in flags if flag in row)
    reason = f"\n    {row['reason']}" if row["reason"] else ""
    return f"trial {row['trial']}: {', '.join(parts)}; {values}{reason}"


def print_trials(
    rows: Sequence[Mapping[str, Any]],
    flags: Sequence[str],
    metric: str,
    *,
    maximize: bool,
    file: TextIO | None = None,
) -> None:
    """Print the best trials first, then the pruned and the failed ones."""
    from rich.console import Console
    from rich.table import Table

    stream = file or sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 110)
    table = Table(title="trials", title_justify="left", title_style="bold", pad_edge=False)
    for name in ("", "outcome", metric, "step", "seconds", "tokens/s", "memory", *flags):
        table.add_column(name, justify="left" if name in ("", "outcome") else "right", overflow="fold")
    ranked = sorted(rows, key=lambda row: _rank(row, maximize=maximize))
    for row in ranked[:_MAX_ROWS]:
        cells = [row["trial"], row["outcome"], row["value"], row["last_step"], row["seconds"], *_costs(row)]
        table.add_row(*(short(cell) for cell in [*cells, *(row.get(flag) for flag in flags)]))
    console.print(table)
    if len(ranked) > _MAX_ROWS:
        console.print(f"and {len(ranked) - _MAX_ROWS} more, in trials.csv")


def _costs(row: Mapping[str, float | None]) -> tuple[str | None, str | None]:
    speed, memory = row.get("tokens_per_second"), row.get("peak_bytes")
    return f"{speed:,.0f}" if speed else None, format_bytes(memory) if memory else None


def short(value: object) -> str:
    """`value` as short text."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _rank(row: Mapping[str, Any], *, maximize: bool) -> tuple[Any, ...]:
    order = {"complete": 0, "pruned": 1}.get(row["outcome"], 2)
    value = row["value"]
    if value is None or value != value:
        return order, 1, 0.0, row["trial"]
    return order, 0, -value if maximize else value, row["trial"]
