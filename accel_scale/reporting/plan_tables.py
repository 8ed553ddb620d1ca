"""A plan on the terminal: the ranked table, why other settings do not fit, and the terms of the best one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import SEGMENTS, kind_of
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.stacks import OURS, STACKS
from accel_scale.planning.cost.overheads import gpu_overhead
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.branches import branch_of
from accel_scale.planning.search.changes import as_flag, cheapest_changes, launch_label
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN
from accel_scale.planning.search.requests import amount
from accel_scale.planning.search.search import Candidate, Plan, Rejection, Request, search, time_of, why_no_time
from accel_scale.planning.search.writing import WrittenPlan
from accel_scale.reporting.plan_terms import print_terms
from accel_scale.reporting.tables import format_count, format_seconds
from accel_scale.units import format_bytes, three_digits

# Share of a step spent waiting for the host above which a plan says so.
_LATE = 0.25
# Share of the memory from which blocks that the allocator keeps are worth a note.
_WORTH_SAYING = 0.1
_WIDTH = 150
_MOST_GPUS = 1024


@dataclass(frozen=True)
class Budgeted:
    """A token budget and the price per GPU hour, if given."""

    tokens: float | None = None
    price_per_gpu_hour: float | None = None

    @classmethod
    def of_flags(cls, tokens: str | None, price_per_gpu_hour: str | None) -> Budgeted:
        """Parse the flags' text.

        Raises:
            ConfigError: if a value is not an amount, or there is a price but no token budget.
        """
        budget = cls(amount(tokens, "--tokens"), amount(price_per_gpu_hour, "--price_per_gpu_hour"))
        if budget.price_per_gpu_hour is not None and budget.tokens is None:
            raise ConfigError("there is nothing to price.", place="--price_per_gpu_hour", fix="add --tokens, like 1B.")
        return budget


def print_plan(plan: Plan, budget: Budgeted, notes: Sequence[str], *, top: int, explain: bool) -> None:
    """Print everything that `accel-scale plan` shows on a terminal."""
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
        print_terms(console, plan.best)


def describe_request(plan: Plan) -> str:
    """One line with model, machine, methods and batch."""
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
    """A setting with its predictions, for JSON."""
    memory, time = candidate.memory, candidate.time
    return {
        "strategy": candidate.choice.label,
        "setup": asdict(candidate.setup),
        "memory": {**memory.as_dict(), "overhead": asdict(gpu_overhead(candidate.setup))},
        "time": None if time is None else asdict(time),
    }


def plan_console(file: TextIO | None = None) -> Any:
    """A console on a terminal, or on a file with the width of a plan table."""
    from rich.console import Console

    stream = file or sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)


# ── The ranked table ─────────────────────────────────────────────────────────────────────────────────────────────────


_WORDS, _FIGURES = (
    ("strategy", "method", "batch", "checkpointing", "optimizer"),
    ("memory per GPU", "step", "tokens/s", "MFU"),
)


def ranked_rows(candidates: Sequence[Candidate], budget: Budgeted) -> list[dict[str, str]]:
    """Rows of the settings table, each a mapping from column to text."""
    asked = ("time", "price")[: (budget.tokens is not None) + (budget.price_per_gpu_hour is not None)]
    names = (*_WORDS, *_FIGURES, *asked)
    return [dict(zip(names, _cells(candidate, budget), strict=False)) for candidate in candidates]


def _ranked(candidates: Sequence[Candidate], budget: Budgeted) -> Any:
    from rich.table import Table

    table = Table(pad_edge=False)
    rows = ranked_rows(candidates, budget)
    for name in rows[0]:
        if name in _WORDS:
            table.add_column(name, overflow="fold", no_wrap=name in ("batch", "optimizer"))
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _cells(candidate: Candidate, budget: Budgeted) -> list[str]:
    setup, time = candidate.setup, candidate.time
    batch = f"{setup.micro_batch_size} × {setup.accumulation}{', sync' * setup.sync_each_batch}"
    policy = f"{setup.checkpointing}{', tiles' * setup.long_rows}"
    cells = [candidate.choice.label, setup.method, batch, policy, setup.optimizer, interval(candidate)]
    if time is None:
        return [*cells, *["?"] * 5]
    cells += [f"{three_digits(time.step_seconds)} s", f"{time.tokens_per_second:,.0f}", f"{time.mfu:.0%}"]
    if budget.tokens is not None:
        cost = time.budget(budget.tokens, budget.price_per_gpu_hour)
        cells.append(f"{cost.hours / 24:,.1f} days" if cost.hours >= 48 else format_seconds(cost.hours * 3600))
        cells.append("" if cost.price is None else f"{cost.price:,.0f}")
    return cells


def interval(candidate: Candidate | Rejection) -> str:
    """Predicted memory on the card, like ``61.2 ± 4.9 GiB``."""
    assert candidate.memory is not None
    return candidate.memory.text


def request_notes(request: Request) -> list[str]:
    """Notes for the user on how a request was interpreted."""
    recipe = request.recipe
    notes = [] if request.machine.links is None else [f"communication from {request.machine.links.line}."]
    if recipe.rows_per_example > 1:
        notes.append(f"micro-batches count rows, {recipe.rows_per_example} for each example of {recipe.script}.")
    if recipe.rewards:
        notes.append("the head has one score in the place of the vocabulary's logits.")
    if request.fixed.get("reference_model") and not all(
        METHOD_FACTS[name].trains_adapters for name in request.methods
    ):
        notes.append("a frozen reference model is counted: its weights and its forward pass.")
    if request.stack != OURS:
        stack = STACKS[request.stack]
        notes += [f"as {request.stack} has it by default ({stack.source}).", *stack.assumptions]
    if recipe.generates:
        notes.append("micro-batches count answers; all answers of a step are written at the same time.")
    if request.model.max_positions and request.sequence_length > request.model.max_positions:
        notes.append(f"{request.model.name} was made for {request.model.max_positions} tokens.")
    if (share := min(layer.position_share for layer in request.model.layers)) < 1:
        notes.append(f"patches of {1 / share:g} bytes, as in its config; those of your text may be shorter or longer.")
    return notes


def time_notes(plan: Plan) -> list[str]:
    """Why times are missing, and the assumptions behind those that are given."""
    notes: list[str] = []
    for candidate in plan.candidates:
        if candidate.time is not None:
            notes += candidate.time.assumptions
        elif (why := why_no_time(plan.request, candidate.setup)) is not None:
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
    if best is not None and best.memory.hoarded_bytes > _WORTH_SAYING * best.memory.device_bytes:
        why = ", as rows differ in length" if best.setup.is_padded else ""
        said.append(
            f"torch's allocator keeps {format_bytes(best.memory.hoarded_bytes)} of that in blocks of little use{why}; "
            "it gives them back when the card is full, and keeps none with "
            "PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    if best is not None and (late := _late_host(plan.request, best)) is not None:
        said.append(late)
    for reason in reasons:
        labels = [note.partition(": ")[0].removeprefix("no time for ") for note in notes if note.endswith(reason)]
        who = "" if len(set(labels)) == len({c.choice.label for c in plan.candidates}) else " for "
        said.append(f"no time{who}{', '.join(dict.fromkeys(labels)) if who else ''}: {reason}")
    return said


def _late_host(request: Request, best: Candidate) -> str | None:
    """How long the GPU waits for the host's kernel launches, and what helps; None if it hardly waits."""
    time = best.time
    if time is None or time.launch_wait_seconds < _LATE * time.step_seconds:
        return None
    share = time.launch_wait_seconds / time.step_seconds
    advice = "longer rows or larger micro-batches cost little more."
    if _compiles(request, best.setup):
        compiled = time_of(request, replace(best.setup, compile=True))
        if compiled is not None:
            advice = f"with --torch_compile true a step is predicted to take {three_digits(compiled.step_seconds)} s."
    return f"the GPU waits for the host, which launches kernels too slowly, for {share:.0%} of a step: {advice}"


def _compiles(request: Request, setup: TrainingSetup) -> bool:
    """True if --torch_compile is accepted with `setup`; fine-tuning refuses it with packed rows for most kernels."""
    if setup.compile or setup.quantises_base or kind_of(setup.checkpointing) == SEGMENTS:
        return False
    if setup.parallel.is_divided or setup.parallel.sequence_parallel > 1:
        return False
    return request.recipe is PRETRAIN_PLAN or (request.recipe is SFT_PLAN and not setup.packing)


# ── Nothing fits ─────────────────────────────────────────────────────────────────────────────────────────────────────


def nothing_fits(plan: Plan) -> list[str]:
    """The nearest miss and the changes that would make it fit."""
    miss = plan.nearest_miss
    if miss is None or miss.setup is None:
        return ["Nothing that was asked for can run."]
    lines = [f"Nothing fits. Nearest: {miss.label}, {miss.method}, {interval(miss)} per GPU: {miss.reason}"]
    is_open = "checkpointing" not in plan.request.fixed
    changes = cheapest_changes(plan.request, miss.setup, policy_is_open=is_open)
    found = [_change(plan.request, flag, setup) for flag, setup in changes]
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
    """What would fit if ranks shared the model, which the requested recipe cannot do."""
    methods = tuple(method for method in request.methods if not METHOD_FACTS[method].quantises_base)
    if request.recipe.shared_by != SFT_PLAN.shared_by or not methods or request.strategies:
        return []
    best = search(replace(request, recipe=PRETRAIN_PLAN, methods=methods)).best
    return [] if best is None else [f"--recipe pretrain ({best.choice.label}, {interval(best)} per GPU)"]


def _more_gpus(request: Request) -> list[str]:
    """The smallest number of GPUs with which something fits, doubling from the present number."""
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


def print_written(written: WrittenPlan | None) -> None:
    """Print the files' paths and the commands to run them, as plain lines for copying."""
    if written is not None:
        print(f"\nwritten   {', '.join(str(path) for path in written.files)}")
        print(f"rehearse  {written.rehearsal}")
        print(f"run       {written.command}")


def print_verification(what: str, rows: Sequence[tuple[str, float, float]], file: TextIO) -> None:
    """Print predicted next to measured, term by term."""
    from rich.table import Table

    table = Table(title=f"\n{what}", title_justify="left", pad_edge=False)
    for name in ("", "predicted", "measured", "off by"):
        table.add_column(name, justify="left" if not name else "right")
    for name, predicted, measured in rows:
        off = f"{round(predicted / measured - 1, 3) + 0.0:+.1%}" if measured else ""  # avoids -0.0%
        table.add_row(name, format_bytes(predicted), format_bytes(measured), off)
    plan_console(file).print(table)
