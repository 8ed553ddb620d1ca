"""The page itself: one self-contained HTML file that loads nothing and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.report_page import figures
from accel_scale.report_page.charts import Chart, as_json, charts_of
from accel_scale.report_page.predictions import PredictedRun, prediction_of
from accel_scale.report_page.reading import RunRecords, number, table
from accel_scale.report_page.thinning import points_per_series
from accel_scale.units import format_bytes
from accel_scale.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_BYTES = 2_000_000
# In the first bytes of every page; a file without it was not written by this command.
GENERATOR = "accel-scale report"
_PAGE = Path(__file__).parent / "page"
_MOST_ROWS = 200


@dataclass(frozen=True)
class RunView:
    """One run as the template shows it."""

    label: str
    how: str
    state: str
    key: Mapping[str, str]
    facts: Mapping[str, str]
    versions: Mapping[str, str]
    prediction: PredictedRun
    events: Sequence[Mapping[str, str]]
    num_events: int
    starts: Sequence[Mapping[str, str]]
    samples: Sequence[figures.AnsweredSample]
    written: str | None
    notes: Sequence[str]


def write_page(text: str, path: Path) -> int:
    """Write a page atomically; returns its size in bytes."""
    content = text.encode()
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(content)


def render(runs: Sequence[RunRecords]) -> str:
    """The page of one run, or of several side by side; at most `MOST_BYTES`.

    Raises:
        ConfigError: if there are more runs than fit.
    """
    labels = figures.labels_of(runs)
    predictions = [prediction_of(run) for run in runs]
    charts = charts_of(runs, labels, predictions)
    views = [_view(run, label, found) for run, label, found in zip(runs, labels, predictions, strict=True)]
    settings = figures.settings_of(runs)
    for share in (1.0, 0.3, 0.1, 0.03):
        text = _filled(views, charts, figures.shortened(settings, share), share)
        if (size := len(text.encode())) <= MOST_BYTES:
            return text
    raise ConfigError(
        f"the page would have {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}.",
        place=f"{len(runs)} runs",
        fix="compare fewer runs.",
    )


def _filled(
    views: Sequence[RunView], charts: Sequence[Chart], settings: Sequence[figures.Setting], share: float
) -> str:
    from markupsafe import Markup

    most = points_per_series(sum(len(chart.series) for chart in charts), share=share)
    style = _asset("uPlot.min.css") + _asset("page.css")
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    each = [dict(view.facts) for view in views]
    return (
        templates_in(_PAGE)
        .get_template("page.html.j2")
        .render(
            generator=GENERATOR,
            version=__version__,
            policy=policy,
            style=Markup(style),
            scripts=[Markup(script) for script in scripts],
            license=_asset("LICENSE-uPlot.txt"),
            data=Markup(in_script({"labels": [view.label for view in views], "charts": _numbered(charts, most)})),
            views=views,
            charts=[chart for chart in charts if not chart.is_more],
            more=[chart for chart in charts if chart.is_more],
            settings=settings,
            differences=figures.differing(settings) if len(views) > 1 else [],
            keys=figures.side_by_side([view.key for view in views]),
            facts=figures.side_by_side(each),
            versions=figures.side_by_side([view.versions for view in views]),
            most_rows=_MOST_ROWS,
        )
    )


@cache
def templates_in(folder: Path) -> Environment:
    """Templates that escape every value and format figures as the report does."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"formatted": figures.formatted, "bare": figures.without_home}
    return found


def in_script(value: object) -> str:
    """JSON that is safe in a script: no HTML parser sees the end of a script in it, no script the end of a line."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _numbered(charts: Sequence[Chart], most: int) -> list[dict[str, object]]:
    ordered = [*(c for c in charts if not c.is_more), *(c for c in charts if c.is_more)]
    return [as_json(chart, most) for chart in ordered]


@cache
def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _view(run: RunRecords, label: str, prediction: PredictedRun) -> RunView:
    how, state = figures.state_of(run)
    return RunView(
        label=label,
        how=how,
        state=state,
        key=figures.key_figures(run),
        facts=figures.facts_of(run),
        versions=figures.versions_of(run),
        prediction=prediction,
        events=[event_row(event) for event in run.events[:_MOST_ROWS]],
        num_events=len(run.events),
        starts=start_rows(run),
        samples=figures.samples_of(run),
        written=figures.written_sample(run),
        notes=[figures.without_home(note) for note in run.notes],
    )


def event_row(event: Mapping[str, object]) -> Mapping[str, str]:
    """A guard event as a table row."""
    rows = event.get("rows")
    shown = [str(row) for row in rows[:8]] if isinstance(rows, list) else []
    more = f" and {len(rows) - 8} more" if isinstance(rows, list) and len(rows) > 8 else ""
    loss, norm = (number(event.get(name)) for name in ("loss", "grad_norm"))
    return {
        "step": figures.text_of(event.get("step")),
        "action": figures.text_of(event.get("action")),
        "reason": figures.text_of(event.get("reason")),
        "loss": figures.text_of(event.get("loss")) if loss is None else figures.formatted(loss, "number"),
        "grad_norm": figures.text_of(event.get("grad_norm")) if norm is None else figures.formatted(norm, "number"),
        "rows": figures.text_of(", ".join(shown) + more),
    }


def start_rows(run: RunRecords) -> list[Mapping[str, str]]:
    """The last starts of a run as table rows, with how each ended."""
    rows: list[Mapping[str, str]] = []
    for at, start in enumerate(run.starts[-_MOST_ROWS:], 1 + max(0, len(run.starts) - _MOST_ROWS)):
        machine = table(start.content.get("machine"))
        devices = machine.get("devices")
        rows.append(
            {
                "number": str(at),
                "date": figures.dated(start.content.get("date")),
                "step": f"{start.step:,}",
                "strategy": figures.text_of(start.content.get("strategy") or ""),
                "ranks": figures.text_of(start.content.get("world_size") or ""),
                "devices": figures.text_of(", ".join(map(str, devices)) if isinstance(devices, list) else ""),
                "end": figures.ENDS.get(start.how, start.how)
                + (f": {figures.text_of(start.why)}" if start.why else ""),
                "ended": figures.dated(start.ended),
            }
        )
    return rows
