"""The log of optimizer steps that were skipped or changed: ``guard_events.jsonl`` and a line on the console."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EVENTS_NAME = "guard_events.jsonl"
_MOST_ROWS_SHOWN = 8


def append_event(output_dir: str | Path, event: Mapping[str, Any]) -> Path:
    """Append one line to the log in `output_dir`; numbers that JSON lacks become "NaN", "Infinity", "-Infinity"."""
    path = Path(output_dir) / EVENTS_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(_plain(event), allow_nan=False) + "\n")
    return path


def read_events(output_dir: str | Path) -> list[dict[str, Any]]:
    """The events written by `append_event`, with loss and norm as numbers again; empty if there are none."""
    path = Path(output_dir) / EVENTS_NAME
    if not path.exists():
        return []
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for event in events:
        for holder in (event, *event["micro_batches"]):
            for name in ("loss", "grad_norm"):
                if isinstance(holder.get(name), str):
                    holder[name] = float(holder[name])
    return events


def console_line(event: Mapping[str, Any]) -> str:
    """The event on one line: the action, the reason, and the rows to look at."""
    what = {
        "stepped": "taken",
        "skipped": "not taken",
        "lowered": "taken at a lower learning rate",
        "rollback": "not taken, going back to the last checkpoint",
        "stop": "not taken, the run stops",
    }[event["action"]]
    rows, which = _rows_to_look_at(event)
    more = f" and {len(rows) - _MOST_ROWS_SHOWN} more" if len(rows) > _MOST_ROWS_SHOWN else ""
    shown = ", ".join(str(row) for row in rows[:_MOST_ROWS_SHOWN])
    return f"warning: step {event['step']} was {what}: {event['reason']}" + (
        f"; {which}: {shown}{more}" if rows else ""
    )


def _rows_to_look_at(event: Mapping[str, Any]) -> tuple[Sequence[Any], str]:
    """The rows of micro-batches whose own loss is not finite, or else those of the whole batch."""
    broken = [part for part in event["micro_batches"] if not math.isfinite(part["loss"])]
    rows = [row for part in broken for row in part["rows"]]
    return (rows, "rows whose loss is not finite") if rows else (event["rows"], "rows in its batch")


def _plain(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
