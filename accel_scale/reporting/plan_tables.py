"""A plan on the terminal: the ranked table, why the rest does not fit, and the terms of the best."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from accel_scale.errors import ConfigError
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.planning.cost.overheads import gpu_overhead
from accel_scale.planning.cost.timing import predict_time
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.branches import branch_of
from accel_scale.planning.search.changes import as_flag, cheapest_changes, launch_label
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN
from accel_scale.planning.search.search import Candidate, Plan, Rejection, Request, search
from accel_scale.planning.search.writing import WrittenPlan
from accel_scale.reporting.tables import format_count, format_seconds
from accel_scale.units import format_bytes

_GIB = 2**30
_WIDTH = 150
_MOST_GPUS = 1024


@dataclass(frozen=True)
class Budgeted:
    """A token budget and the price of a GPU for an hour, where given."""

    tokens: float | None = None
    price_per_gpu_hour: float | None = None


def print_plan(plan: Plan, budget: Budgeted, notes: Sequence[str], *, top: int, explain: bool) -> None:
    """Everything that `accel-scale plan` says on a terminal."""
    console = plan_console()
    console.print(describe_request(plan), soft_wrap=True)
    if plan.best is not None:
        console.print(_ranked(plan.candidates[:top], budget))
        if len(plan.candidates) > top:
            console.print(f"{len(plan.candidates) - top} more fit: --top {len(plan.candidates)}", style="dim")
        console.print(branch_of(plan.best.setup).line, soft_wrap=True, markup=False)
        notes = [*notes, *time_notes(plan)]
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    if plan.rejections:
        console.print("\nrejected", style="bold")
        for rejection in plan.rejections:
            console.print(f"  {rejection.label}, {rejection.method}: {rejection.reason}", soft_wrap=True, markup=False)
    if plan.best is None:
        for line in nothing_fits(plan):
            console.print(line, soft_wrap=True, markup=False)
    elif explain:
        _print_terms(console, plan.best)


def describe_request(plan: Plan) -> str:
    """One line: model, machine, batch, methods."""
    request, machine = plan.request, plan.request.machine
    rows = "packed" if request.fixed.get("packing", True) else "padded"
    nodes = f" in {machine.num_nodes} nodes" if machine.num_nodes > 1 else ""
    return (
        f"{request.model.name}, {format_count(request.model.num_params)} parameters, on {machine.num_gpus} × "
        f"{machine.gpu.name} ({format_bytes(machine.gpu.memory_bytes)} each{nodes}): {', '.join(request.methods)} in "
        f"{request.fixed.get('precision', 'bf16')}, {request.global_batch_size} × {request.sequence_length} tokens "
        f"per step, {rows}; {plan.num_considered} settings considered"
    )


def candidate_dict(candidate: Candidate) -> dict[str, object]:
    """A setting with what is predicted for it, for JSON."""
    memory, time = candidate.memory, candidate.time
    return {
        "strategy": candidate.choice.label,
        "setup": asdict(candidate.setup),
        "memory": {**memory.as_dict(), "overhead": asdict(gpu_overhead(candidate.setup))},
        "time": None if time is None else asdict(time),
    }


def plan_console(file: TextIO | None = None) -> Any:
    """A terminal, or a file as wide as a table of plans."""
    from rich.console import Console

    stream = file or sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)


# ── The ranked table ─────────────────────────────────────────────────────────────────────────────────────────────────


def _ranked(candidates: Sequence[Candidate], budget: Budgeted) -> Any:
    from rich.table import Table

    table = Table(pad_edge=False)
    left = ("strategy", "method", "batch", "checkpointing", "optimizer")
    right = ["memory per GPU", "step", "tokens/s", "MFU"]
    right += ["time", "price"][: (budget.tokens is not None) + (budget.price_per_gpu_hour is not None)]
    for name in left:
        table.add_column(name, overflow="fold", no_wrap=name in ("batch", "optimizer"))
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in candidates:
        cells = _cells(candidate, budget)
        table.add_row(*cells[: len(left) + len(right)])
    return table


def _cells(candidate: Candidate, budget: Budgeted) -> list[str]:
    setup, time = candidate.setup, candidate.time
    batch = f"{setup.micro_batch_size} × {setup.accumulation}{', sync' * setup.sync_each_batch}"
    policy = f"{setup.checkpointing}{', tiles' * setup.long_rows}"
    cells = [candidate.choice.label, setup.method, batch, policy, setup.optimizer, interval(candidate)]
    if time is None:
        return [*cells, *["?"] * 5]
    cells += [f"{time.step_seconds:.3g} s", f"{time.tokens_per_second:,.0f}", f"{time.mfu:.0%}"]
    if budget.tokens is not None:
        cost = time.budget(budget.tokens, budget.price_per_gpu_hour)
        cells.append(f"{cost.hours / 24:,.1f} days" if cost.hours >= 48 else format_seconds(cost.hours * 3600))
        cells.append("" if cost.price is None else f"{cost.price:,.0f}")
    return cells


def interval(candidate: Candidate | Rejection) -> str:
    """``61.2 ± 4.9 GiB``: what the card will show."""
    memory = candidate.memory
    assert memory is not None
    return f"{memory.device_bytes / _GIB:.1f} ± {(memory.high_bytes - memory.device_bytes) / _GIB:.1f} GiB"


def time_notes(plan: Plan) -> list[str]:
    """Why times are missing, and what was assumed for those that are there."""
    notes: list[str] = []
    for candidate in plan.candidates:
        if candidate.time is not None:
            notes += candidate.time.assumptions
        elif (why := _why_no_time(plan.request, candidate)) is not None:
            notes.append(f"no time for {candidate.choice.label}: {why}")
    reasons = list(dict.fromkeys(note.partition(": ")[2] for note in notes if note.startswith("no time for ")))
    said = [note for note in dict.fromkeys(notes) if not note.startswith("no time for ")]
    best = plan.best
    if best is not None and best.setup.parallel.is_divided:
        size = format_bytes(best.memory.host_bytes)
        said.append(f"a rank of each server builds the whole model: {size} of its memory, and as much disk in TMPDIR.")
    if any(candidate.setup.sync_each_batch for candidate in plan.candidates):
        said.append("sync: with --sync_each_batch true, which reduces the gradients of every micro-batch.")
    if best is not None and best.setup.checkpointing == "offload":
        said.append(f"{format_bytes(best.memory.host_bytes)} of host memory for each GPU, for the layers' inputs.")
    for reason in reasons:
        labels = [note.partition(": ")[0].removeprefix("no time for ") for note in notes if note.endswith(reason)]
        who = "" if len(set(labels)) == len({c.choice.label for c in plan.candidates}) else " for "
        said.append(f"no time{who}{', '.join(dict.fromkeys(labels)) if who else ''}: {reason}")
    return said


def _why_no_time(request: Request, candidate: Candidate) -> str | None:
    try:
        predict_time(request.model, candidate.setup, request.machine, document_length=request.document_length)
    except ConfigError as error:
        fix = "give --nvme, like 6GB." if error.place == "nvme" else error.fix
        return f"{error.problem} Fix: {fix}"
    return None


# ── Nothing fits ─────────────────────────────────────────────────────────────────────────────────────────────────────


def nothing_fits(plan: Plan) -> list[str]:
    """The nearest miss and what would help."""
    miss = plan.nearest_miss
    if miss is None or miss.setup is None:
        return ["Nothing that was asked for can run."]
    lines = [f"Nothing fits. Nearest: {miss.label}, {miss.method}, {interval(miss)} per GPU: {miss.reason}"]
    found = [_change(plan.request, flag, setup) for flag, setup in cheapest_changes(plan.request, miss.setup)]
    found += _other_recipe(plan.request)
    if not found:
        found = _more_gpus(plan.request)
    lines += [f"  would fit: {text}" for text in found]
    return lines if found else [*lines, "  No single change is enough: combine them, or take a smaller model."]


def _change(request: Request, flag: str, setup: TrainingSetup) -> str:
    if flag == "--per_device_train_batch_size":
        return f"{flag} {setup.micro_batch_size // request.recipe.rows_per_example}"
    return as_flag(flag, setup) or f"--strategy '{launch_label(setup, request.machine)}'"


def _other_recipe(request: Request) -> list[str]:
    """What would fit if ranks shared the model, which the recipe that was asked for cannot do."""
    methods = tuple(method for method in request.methods if not METHOD_FACTS[method].quantises_base)
    if request.recipe.shared_by != SFT_PLAN.shared_by or not methods or request.strategies:
        return []
    best = search(replace(request, recipe=PRETRAIN_PLAN, methods=methods)).best
    return [] if best is None else [f"--recipe pretrain ({best.choice.label}, {interval(best)} per GPU)"]


def _more_gpus(request: Request) -> list[str]:
    """The fewest GPUs, in powers of two times those there are, with which something fits."""
    machine, count = request.machine, 2 * request.machine.num_gpus
    while count <= _MOST_GPUS and request.global_batch_size % count == 0:
        per_node = max(machine.gpus_per_node, min(8, count))
        more = replace(request, machine=replace(machine, num_gpus=count, gpus_per_node=per_node), strategies=())
        try:
            best = search(more).best
        except ConfigError:
            return []
        if best is not None:
            return [f"--num_gpus {count} ({best.choice.label}, {interval(best)} per GPU)"]
        count *= 2
    return []


# ── The terms ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _print_terms(console: Any, candidate: Candidate) -> None:
    from rich.table import Table

    memory = candidate.memory
    table = Table(title=f"\n{candidate.choice.label}: GiB on each GPU", title_justify="left", pad_edge=False)
    table.add_column("")
    for phase in memory.phases:
        table.add_column(phase.name, justify="right", style="bold" if phase is memory.peak_phase else None)
    names = dict.fromkeys(name for phase in memory.phases for name, value in phase.terms if value)
    for name in names:
        sizes = [dict(phase.terms).get(name, 0.0) for phase in memory.phases]
        table.add_row(name, *(f"{size / _GIB:.2f}" if size else "" for size in sizes))
    table.add_section()
    table.add_row("in tensors", *(f"{phase.total_bytes / _GIB:.2f}" for phase in memory.phases))
    console.print(table)
    console.print(_side_by_side("peak on each GPU", _gpu_rows(candidate), "{:.2f} GiB", _GIB))
    console.print(f"host memory of a rank, at most: {format_bytes(memory.host_bytes)}")
    if candidate.time is not None:
        console.print(_side_by_side("one optimizer step", _time_rows(candidate), "{:.3f} s", 1))


def _side_by_side(title: str, rows: dict[str, float], text: str, unit: float) -> Any:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, text.format(value / unit))
    return table


def _gpu_rows(candidate: Candidate) -> dict[str, float]:
    memory, overhead = candidate.memory, gpu_overhead(candidate.setup)
    return {
        f"in tensors ({memory.peak_phase.name})": memory.peak_bytes,
        "+ lost by the allocator": memory.reserved_bytes - memory.peak_bytes,
        "+ CUDA context": overhead.context_bytes,
        "+ NCCL": overhead.communication_bytes,
        "= on the card": memory.device_bytes,
        "lower end": memory.low_bytes,
        "upper end, which must fit": memory.high_bytes,
    }


def _time_rows(candidate: Candidate) -> dict[str, float]:
    time = candidate.time
    assert time is not None
    return {
        "matrix products and attention": time.matmul_seconds,
        "memory traffic": time.memory_seconds,
        "waiting for kernel launches": time.launch_wait_seconds,
        "pipeline stages that wait": time.bubble_seconds,
        "communication that shows": time.exposed_communication_seconds,
        "optimizer": time.optimizer_seconds,
        "offload": time.offload_seconds,
        **({"writing answers": time.generation_seconds} if time.generation_seconds else {}),
        "step": time.step_seconds,
        "lower end": time.low_seconds,
        "upper end": time.high_seconds,
    }


def print_written(written: WrittenPlan | None) -> None:
    """Where the files are and how to run them; plain lines, to be copied."""
    if written is not None:
        print(f"\nwritten   {', '.join(str(path) for path in written.files)}")
        print(f"rehearse  {written.rehearsal}")
        print(f"run       {written.command}")


def print_verification(what: str, rows: Sequence[tuple[str, float, float]], file: TextIO) -> None:
    """Predicted beside measured, term by term."""
    from rich.table import Table

    table = Table(title=f"\n{what}", title_justify="left", pad_edge=False)
    for name in ("", "predicted", "measured", "off by"):
        table.add_column(name, justify="left" if not name else "right")
    for name, predicted, measured in rows:
        off = f"{round(predicted / measured - 1, 3) + 0.0:+.1%}" if measured else ""  # no minus before a zero
        table.add_row(name, format_bytes(predicted), format_bytes(measured), off)
    plan_console(file).print(table)
