"""Answers to questions about a plan, as terminal tables and for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_scale.planning.cost.inference import InferenceEstimate
from accel_scale.planning.search.questions import PlanDifference, PricedPlan, settings_of
from accel_scale.reporting.plan_tables import candidate_dict, interval, plan_console
from accel_scale.reporting.tables import format_count, format_seconds
from accel_scale.units import three_digits

if TYPE_CHECKING:
    from rich.table import Table

_GIB = 2**30


def print_cheapest(plans: Sequence[PricedPlan], tokens: float) -> None:
    """Print the machines with the cost of the job, cheapest first."""
    left = ("card", "GPUs", "strategy", "batch, checkpointing, optimizer")
    table = _table(f"{format_count(tokens)} tokens", left, ("memory per GPU", "time", "price"))
    for plan in plans:
        best, budget = plan.best, plan.budget
        if best is None or budget is None:
            continue
        cells = [plan.price.card, str(plan.price.num_gpus), f"{best.choice.label}, {best.setup.method}"]
        cells += [settings_of(best.setup), interval(best), format_seconds(budget.hours * 3600)]
        table.add_row(*cells, f"{budget.price or 0:,.2f}")
    console = plan_console()
    console.print(table)
    for plan in plans:
        if plan.best is None:
            who = f"{plan.price.num_gpus} × {plan.price.card}"
            console.print(f"  not on {who}: {plan.reason}", soft_wrap=True, markup=False)


def print_differences(differences: Sequence[PlanDifference]) -> None:
    """Print the base and the result of each change."""
    columns = ("memory per GPU", "", "step", "", "tokens/s", "")
    table = _table("what if", ("change", "strategy", "batch, checkpointing, optimizer"), columns)
    for item in differences:
        table.add_row(*difference_cells(item))
    console = plan_console()
    console.print(table)
    for item in differences:
        if item.best is not None and item.reason:
            console.print(f"note: {item.change or '(base)'}: no time: {item.reason}", soft_wrap=True, markup=False)


def difference_cells(item: PlanDifference) -> list[str]:
    """Cells of change, strategy and settings, then memory, step time and tokens/s, each with its difference."""
    best = item.best
    if best is None:
        return [item.change or "(base)", "nothing fits", item.reason, *[""] * 6]
    time = best.time
    cells = [item.change or "(base)", f"{best.choice.label}, {best.setup.method}", settings_of(best.setup)]
    cells += [interval(best), _signed(item, "memory_bytes", _GIB, " GiB")]
    if time is None:
        return [*cells, "?", "", "?", ""]
    cells += [f"{three_digits(time.step_seconds)} s", _signed(item, "step_seconds", 1, " s")]
    return [*cells, f"{time.tokens_per_second:,.0f}", _signed(item, "tokens_per_second", 1, "")]


def print_inference(model: str, estimates: Sequence[InferenceEstimate]) -> None:
    """Print the memory for inference, by type of the weights."""
    first = estimates[0]
    title = f"{model}: {first.batch} answers at a time, {first.length:,} tokens with their prompts"
    table = _table(title, ("weights",), ("weights, GiB", "key-value cache", "forward pass", "on the card"))
    for found in estimates:
        sizes = (found.weight_bytes, found.cache_bytes, found.pass_bytes, found.device_bytes)
        table.add_row(found.weights, *(f"{size / _GIB:.2f}" for size in sizes))
    plan_console().print(table)


def priced_dict(plan: PricedPlan) -> dict[str, object]:
    """A priced plan for JSON."""
    return {
        **dataclasses.asdict(plan.price),
        "budget": plan.budget and dataclasses.asdict(plan.budget),
        "best": plan.best and candidate_dict(plan.best),
        "reason": plan.reason,
    }


def difference_dict(item: PlanDifference) -> dict[str, object]:
    """A difference for JSON."""
    plain = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return {**plain, "best": item.best and candidate_dict(item.best)}


def _signed(item: PlanDifference, name: str, unit: float, suffix: str) -> str:
    value = getattr(item, name)
    if value is None or not item.change:
        return ""
    return f"{value / unit:+,.3g}{suffix}" if abs(value / unit) < 1000 else f"{value / unit:+,.0f}{suffix}"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
