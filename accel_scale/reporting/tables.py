"""The compact tables a run prints at its start and end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO


def print_table(title: str, rows: Mapping[str, object], *, file: TextIO | None = None) -> None:
    """Print `rows` (name → value; `None` is left out) under `title`, as wide as the terminal and no wider."""
    from rich.console import Console
    from rich.table import Table

    stream = file or sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 110)
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, str(value))
    console.print(table)


def format_count(count: float) -> str:
    """`count` in readable form: ``1.24M``, ``7.00B``, ``12,345``."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(count) >= factor:
            return f"{count / factor:.2f}{suffix}"
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """``48.2 s``, ``3 min 20 s`` or ``5 h 02 min``."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
