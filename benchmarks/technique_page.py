"""`techniques.py`: the page with claims and ladders as Markdown, made from rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from technique_claims import Claim, read_claims
from technique_rows import KINDS, PARALLEL_RUNGS, RUNGS, TOO_LARGE_ON_FOUR, Rung, Stage

from accel_scale.units import format_bytes

MISSING = "not measured yet"
HEADER = """# Techniques

What courses, papers and handbooks state about training at scale, beside figures of this project, and what each
technique costs and saves here. Written by `python benchmarks/techniques.py`, never by hand.

**Arithmetic** is from the formulas that plans use. **Predicted** is by the planner, for H100 GPUs; nothing here was
measured on a GPU. **Measured** is on CPU processes: bytes are counted exactly, times are ratios between turns of one
run, and what a CPU cannot show is left to the prediction.
"""


class _Number(float):
    """A number that also formats bytes: ``{:GiB}`` and ``{:MiB}`` print them in readable form."""

    def __format__(self, spec: str) -> str:
        return format_bytes(float(self)) if spec.endswith("iB") else super().__format__(spec)


def page(stages: Mapping[str, Stage], rows: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = [HEADER, "## The ladder", *_ladders(rows), "## Strategies", *_strategies(rows), "## Claims"]
    for topic, claims in groupby(read_claims(), key=lambda claim: claim.topic):
        lines += [
            "",
            f"### {topic}",
            "",
            "| stated | arithmetic | predicted | measured | |",
            "|---|---|---|---|---|",
            *(_claim(claim, rows) for claim in claims),
        ]
    lines += ["", "## How the rows were made", "", "| stage | what | when and where |", "|---|---|---|"]
    lines += [f"| {stage.name}, {stage.kind} | {stage.how} | {_where(stage, rows)} |" for stage in stages.values()]
    return "\n".join(lines) + "\n"


def figure(rows: Mapping[str, Any], row: str, template: str) -> str:
    """`template` filled with the values of `row`, or a text that it is missing."""
    if row not in rows:
        return MISSING
    values = rows[row]["values"]
    numbers = {name: _Number(value) if isinstance(value, (int, float)) else value for name, value in values.items()}
    return template.format_map(numbers)


def kind_of(row: str, rows: Mapping[str, Any]) -> str:
    """The kind of a row; missing rows are measured ones."""
    return rows[row]["kind"] if row in rows else "measured"


def _claim(claim: Claim, rows: Mapping[str, Any]) -> str:
    cells: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for row, template in claim.figures:
        text = figure(rows, row, template)
        cell = cells[kind_of(row, rows)]
        if text != MISSING or MISSING not in cell:
            cell.append(text)
    return f"| {claim.stated} | {' | '.join('; '.join(cells[kind]) for kind in KINDS)} | {claim.note} |"


def _ladders(rows: Mapping[str, Any]) -> list[str]:
    """Table of each rung on one H100 and on this CPU, with speed and memory as ratios."""
    lines = [
        "",
        "A rung adds one technique to the rung that *on* names. Speed and memory are × that rung, in brackets × the "
        "first. On the H100 rows of 2,048 tokens of a 1.7B model; on the CPU a model of a few megabytes, and its loss "
        "after the same 16 steps from the same weights, in which rounding alone makes up to a tenth. *Planned* is how "
        "far the planner is off the CPU's bytes. On a CPU without bf16 arithmetic the rungs above mixed precision "
        "stand on the rung below it.",
        "",
        "| | on | H100 speed, predicted | H100 memory, predicted | CPU speed, measured | "
        "CPU tensors, measured | planned | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    speed = "{speed_step:.2f} × ({speed:.1f})"
    for rung in RUNGS:
        cells = [
            rung.label,
            rung.on or "",
            figure(rows, f"h100/{rung.name}", speed),
            figure(rows, f"h100/{rung.name}", "{bytes_step:.2f} × ({bytes_total:.2f}), {bytes:GiB}"),
            figure(rows, f"cpu/{rung.name}", speed + _on(rung, rows)),
            figure(rows, f"cpu/{rung.name}", "{bytes_step:.2f} × ({bytes_total:.2f}), {bytes:MiB}"),
            figure(rows, f"cpu/{rung.name}", "{planned_off:+.1%}"),
            _loss(rung, rows),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _loss(rung: Rung, rows: Mapping[str, Any]) -> str:
    """Loss after the ladder's few steps; for other optimizers and adapters, of a longer run at their own rates."""
    longer = rows.get(f"quality/{rung.name}") if rung.name != "full" else None
    if longer:
        return f"{longer['values']['eval_loss']:.3f} after a longer run"
    return "" if {"optimizer", "method"} & rung.changes.keys() else figure(rows, f"cpu/{rung.name}", "{loss:.3f}")


def _on(rung: Rung, rows: Mapping[str, Any]) -> str:
    """The rung on which the CPU's rung stands, if it is a different one."""
    on = rows.get(f"cpu/{rung.name}", {}).get("values", {}).get("on", rung.on)
    return f", on {on}" if on and on != rung.on else ""


def _strategies(rows: Mapping[str, Any]) -> list[str]:
    """Table of the strategies for several ranks."""
    lines = [
        "",
        "At one global batch, × DDP. *Fits* is on cards of 80 GB. Processes measured share two cores, so their "
        "speeds say what a strategy adds to DDP's work and communication over gloo, not how it scales. Tensors of "
        "DeepSpeed's ranks are mostly buckets for 500 million values, whatever the model; this one has 3 million. "
        "ZeRO-2's were not measured on four processes (–), where they fill this machine's memory.",
        "",
        "| | 8B on 8 × H100, predicted | a card | fits | 70B: a card | fits | 2 processes, measured: speed | "
        "tensors of a rank | 4 processes: tensors of a rank | loss against DDP |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, label, _ in PARALLEL_RUNGS:
        cells = [
            label,
            figure(rows, f"h100x8/{name}", "{speed:.2f} ×"),
            figure(rows, f"h100x8/{name}", "{bytes:GiB}"),
            _fits(rows, f"h100x8/{name}"),
            figure(rows, f"h100x8_70b/{name}", "{bytes:GiB}"),
            _fits(rows, f"h100x8_70b/{name}"),
            figure(rows, f"ranks/{name}", "{speed:.2f} × ({speed_low:.2f}–{speed_high:.2f})"),
            figure(rows, f"ranks/{name}", "{bytes_total:.2f} ×, {bytes:MiB}"),
            "–" if name in TOO_LARGE_ON_FOUR else figure(rows, f"ranks4/{name}", "{bytes_total:.2f} ×"),
            figure(rows, f"ranks/{name}", "{loss_difference:.0e}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _fits(rows: Mapping[str, Any], row: str) -> str:
    return MISSING if row not in rows else "yes" if rows[row]["values"]["fits"] else "no"


def _where(stage: Stage, rows: Mapping[str, Any]) -> str:
    """Dates, machines and versions of a stage's measured rows, each combination once."""
    names = [name for work in stage.works for name in work.rows]
    found = dict.fromkeys(
        f"{row['date']}, {row['machine']}, load {row['load']:.0f}, "
        + ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        for name in names
        if (row := rows.get(name)) and "date" in row
    )
    missing = sum(name not in rows for name in names)
    return "; ".join([*found, *([f"{missing} of {len(names)} rows missing"] if missing else [])])
