"""Parameters, tokens and compute from one another, the loss to expect, and what it takes on given hardware.

  accel-scale scaling --compute 1e22
  accel-scale scaling --params 7B --tokens 1T --law refit --gpu H100 --num_gpus 64 --price_per_gpu_hour 2
  accel-scale scaling --fit runs.csv --plot fit.svg --compute 1e21
  accel-scale scaling --tables

Give one of --params, --tokens, --compute (the others are compute-optimal) or two (C = 6ND gives the third).
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.units import three_digits

if TYPE_CHECKING:
    from accel_scale.planning.laws.reference_tables import ReferenceTable
    from accel_scale.planning.laws.scaling_fit import Fit
    from accel_scale.planning.laws.scaling_laws import NamedLaw, ScalingPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale scaling`."""
    parser.add_argument("--params", metavar="N", help="parameters, e.g. 7B")
    parser.add_argument("--tokens", metavar="D", help="training tokens, e.g. 140B")
    parser.add_argument("--compute", metavar="C", help="training FLOPs, e.g. 1e21")
    parser.add_argument("--law", help="chinchilla, refit, kaplan or rule (default: all, side by side)")
    parser.add_argument("--gpu", help="hardware for time and price: a card of the catalogue, e.g. H100")
    parser.add_argument("--num_gpus", metavar="COUNT", default="1", help="how many of them (default: 1)")
    parser.add_argument("--mfu", default="0.4", help="share of their dense peak that is reached (default: 0.4)")
    parser.add_argument("--price_per_gpu_hour", metavar="PRICE", help="in any currency")
    parser.add_argument("--fit", metavar="CSV", help="fit L(N, D) to runs: columns params, tokens (or flops), loss")
    parser.add_argument("--plot", metavar="SVG", help="with --fit: draw runs and fitted curves into this .svg file")
    parser.add_argument("--tables", action="store_true", help="print the reference tables and the GPU catalogue")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    document: dict[str, Any] = {}
    tables: list[ReferenceTable] = []
    if args.plot and not args.fit:
        raise ConfigError("there is nothing to draw.", place="--plot", fix="add --fit runs.csv.")
    if args.tables:
        tables += _reference(document)
    laws = [] if args.law is None else [_named(args.law)]
    if args.fit:
        laws.append(_fit(args, document, tables))
    if any((args.params, args.tokens, args.compute)):
        tables += _plans(args, laws, document)
    if not tables:
        flags = "--params, --tokens, --compute, --fit or --tables"
        raise ConfigError("there is nothing to compute.", place="command line", fix=f"add {flags}.")
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        for table in tables:
            _print(table)
    return 0


def _reference(document: dict[str, Any]) -> list[ReferenceTable]:
    from dataclasses import asdict

    from accel_scale.planning.laws.reference_tables import gpu_table, reference_tables

    tables = {**reference_tables(), "gpus": gpu_table()}
    document["tables"] = {name: asdict(table) for name, table in tables.items()}
    return list(tables.values())


def _named(name: str) -> NamedLaw:
    from accel_scale.planning.laws.scaling_laws import find_law

    return find_law(name)


def _fit(args: argparse.Namespace, document: dict[str, Any], tables: list[ReferenceTable]) -> NamedLaw:
    """The law fitted to the user's own runs; adds its table and writes the plot."""
    from dataclasses import asdict
    from pathlib import Path

    from accel_scale.planning.laws.scaling_fit import draw_fit, fit_runs, read_runs
    from accel_scale.planning.laws.scaling_laws import NamedLaw

    if args.plot and not args.plot.lower().endswith(".svg"):
        raise ConfigError(f"{args.plot} is not an .svg file.", place="--plot", fix="name it like fit.svg.")
    runs = read_runs(args.fit)
    fit = fit_runs(runs)
    document["fit"] = asdict(fit)
    tables.append(_fit_table(fit, args.fit))
    if args.plot:
        try:
            Path(args.plot).write_text(draw_fit(fit, runs), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}.", place=args.plot, fix="name another.") from None
    sizes, tokens = [run.params for run in runs], [run.tokens for run in runs]
    return NamedLaw("fit", f"fitted to {args.fit}", fit.law, (min(sizes), max(sizes)), (min(tokens), max(tokens)))


def _fit_table(fit: Fit, path: str) -> ReferenceTable:
    from accel_scale.planning.laws.reference_tables import ReferenceTable

    symbols = dict(zip(fit.intervals, ("E", "A", "α", "B", "β"), strict=True))
    rows = tuple(
        (symbols[name], getattr(fit.law, name), f"{low:.4g} – {high:.4g}")
        for name, (low, high) in fit.intervals.items()
    )
    note = f"{fit.num_runs} runs, median residual {100 * fit.residual:.2g}%; intervals from resampled runs."
    return ReferenceTable(f"L(N, D) = E + A/N^α + B/D^β, fitted to {path}", ("", "value", "95% interval"), rows, note)


def _plans(args: argparse.Namespace, laws: list[NamedLaw], document: dict[str, Any]) -> list[ReferenceTable]:
    from dataclasses import asdict

    from accel_scale.planning.laws.reference_tables import ReferenceTable
    from accel_scale.planning.laws.scaling_laws import LAWS, parse_count, plan_scaling

    names = ("params", "tokens", "compute")
    given = {name: parse_count(getattr(args, name), place=f"--{name}") for name in names if getattr(args, name)}
    laws = laws or list(LAWS.values())
    plans = [plan_scaling(law, **given) for law in laws]
    costs = [_cost(args, plan) for plan in plans]
    document["plans"] = [asdict(plan) | cost for plan, cost in zip(plans, costs, strict=True)]
    cells = [_cells(plan, cost) for plan, cost in zip(plans, costs, strict=True)]
    rows = tuple((name, *(column[name] for column in cells)) for name in cells[0] if any(c[name] for c in cells))
    notes = [f"{law.name}: {law.source}" for law in laws]
    notes += [f"{plan.law}: {note}" for plan in plans for note in plan.notes]
    return [ReferenceTable("Scaling", ("", *(law.name for law in laws)), rows, "\n".join(notes))]


def _cost(args: argparse.Namespace, plan: ScalingPlan) -> dict[str, float | None]:
    """Hours, energy and price of a plan; empty without ``--gpu``."""
    if args.gpu is None:
        return {}
    from accel_scale.facts.hardware import find_gpu
    from accel_scale.planning.cost.timing import token_budget
    from accel_scale.planning.laws.scaling_laws import parse_count

    gpu = find_gpu(args.gpu)
    count = parse_count(args.num_gpus, place="--num_gpus")
    mfu = parse_count(args.mfu, place="--mfu")
    if count != int(count):
        raise ConfigError(f"{args.num_gpus} GPUs.", place="--num_gpus", fix="give a whole number.")
    if mfu > 1:
        raise ConfigError(f"{args.mfu} is more than the peak.", place="--mfu", fix="give a share like 0.4.")
    price = parse_count(args.price_per_gpu_hour, place="--price_per_gpu_hour") if args.price_per_gpu_hour else None
    speed = gpu.flops("fp16" if gpu.supports_bf16 is False else "bf16") * count * mfu
    budget = token_budget(plan.tokens, plan.tokens * speed / plan.compute, int(count), gpu.watts, price)
    return {
        "hours": budget.hours,
        "gpu_hours": budget.gpu_hours,
        "energy_kwh": budget.energy_kwh,
        "price": budget.price,
    }


def _cells(plan: ScalingPlan, cost: dict[str, float | None]) -> dict[str, str]:
    from accel_scale.reporting.tables import format_count, format_seconds

    def optional(value: float | None, text: str) -> str:
        return "" if value is None else text.format(value)

    hours = cost.get("hours")
    return {
        "parameters": format_count(plan.params),
        "tokens": format_count(plan.tokens),
        "tokens per parameter": three_digits(plan.tokens_per_param),
        "compute, FLOPs": f"{plan.compute:.3g}",
        "expected loss, nats": optional(plan.loss, "{:.3f}"),
        "optimum for that compute": f"{format_count(plan.optimal_params)} × {format_count(plan.optimal_tokens)}",
        "loss there": optional(plan.optimal_loss, "{:.3f}"),
        "compute over the optimum": optional(plan.extra_compute and 100 * plan.extra_compute, "{:+.1f}%"),
        "time": "" if hours is None else _duration(hours, format_seconds),
        "GPU-hours": optional(cost.get("gpu_hours"), "{:,.0f}"),
        "energy, kWh": optional(cost.get("energy_kwh"), "{:,.0f}"),
        "price": optional(cost.get("price"), "{:,.0f}"),
    }


def _duration(hours: float, short: Any) -> str:
    return f"{hours / 24:,.1f} days" if hours >= 48 else str(short(hours * 3600))


def _print(table: ReferenceTable) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 118)
    console.print(table.title, style="bold", markup=False)
    drawn = RichTable()
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in table:
        drawn.add_row(*(cell if isinstance(cell, str) else _number(cell) for cell in row))
    console.print(drawn)
    if table.note:
        console.print(table.note, style="dim", markup=False)


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if value < 1e9 else f"{value:.3g}"
