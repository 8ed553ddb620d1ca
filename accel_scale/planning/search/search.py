"""The search over every combination the user left open: what fits, and which is fastest."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from accel_scale.errors import ConfigError, NotRunError
from accel_scale.facts.hardware import Machine
from accel_scale.planning.cost.memory import MemoryEstimate, predict_memory
from accel_scale.planning.cost.strategies import ParallelChoice, choices
from accel_scale.planning.cost.timing import TimeEstimate, known_time, predict_time
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.model_parallel import families
from accel_scale.planning.search.plan import Candidate, Plan, Rejection, Request
from accel_scale.planning.search.settings import open_choices, settings_of, states_exceed, why_not
from accel_scale.planning.traced.fits import end_progress
from accel_scale.planning.traced.steps import step_bytes
from accel_scale.units import format_bytes

__all__ = ["Candidate", "Plan", "Rejection", "Request", "may_share", "problem_of", "search", "time_of"]

# Predicted times closer than this are a tie, won by the simpler setting.
_TIE = 0.03
# Rows are long if their activations, with recomputation, take more than this share of a card.
_LONG_ROWS = 0.5


def search(request: Request) -> Plan:
    """Every combination of strategy, method, checkpointing, optimizer and micro-batch, ranked.

    Ranked by predicted time per step at the requested global batch; settings within 3 % of each other count as
    equal, and the simplest of them comes first. Tensor, pipeline and sequence parallelism are considered when nothing
    else fits, when the global batch is too small for data parallelism alone, and when they are requested.

    Raises:
        ConfigError: if the global batch does not divide among the ranks, or a fixed setting is unknown.
    """
    machine = request.machine
    if request.choices:
        return _plan(request, *_try(request, request.choices))
    can_share = machine.num_gpus > 1 and may_share(request)
    found: list[Candidate] = []
    rejected: list[Rejection] = []
    considered = 0
    if request.global_batch_size % machine.num_gpus and not can_share:
        raise ConfigError(
            f"a global batch of {request.global_batch_size} does not divide among {machine.num_gpus} ranks.",
            place="--global_batch_size",
            fix=f"use a multiple of {machine.num_gpus}.",
        )
    if request.global_batch_size % machine.num_gpus:
        reason = f"{request.global_batch_size} sequences do not divide among {machine.num_gpus} ranks"
        rejected = [Rejection("data parallelism alone", method, reason) for method in request.methods]
    elif request.degrees.is_open:
        found, rejected, considered = _try(request, choices(machine.num_gpus, machine.gpus_per_node))
    if not found and can_share:
        found, also, again = _share_model(request)
        rejected, considered = rejected + also, considered + again
    return _plan(request, found, rejected, considered)


def may_share(request: Request) -> bool:
    """True if the recipe can share the model. If it can only share rows, they must be long or sharing be requested."""
    recipe = request.recipe
    return bool(recipe.shared_by) and (recipe.divides_model or not request.degrees.is_open or _has_long_rows(request))


def _share_model(request: Request) -> tuple[list[Candidate], list[Rejection], int]:
    """The lowest degree that fits, for every combination of tensor, pipeline and sequence parallelism."""
    machine = request.machine
    found: list[Candidate] = []
    rejected: list[Rejection] = []
    considered = 0
    asked = machine.num_gpus, machine.gpus_per_node, request.degrees, request.schedule
    for family in families(request.model, *asked, long_rows=_has_long_rows(request), recipe=request.recipe):
        refused: list[Rejection] = []
        best: list[Candidate] = []
        for level in family:
            for _, options in itertools.groupby(level, key=lambda choice: choice.parallel.degrees):
                fitting, reasons, count = _try(request, options)
                considered += count
                best += fitting
                # If nothing fits in a combination, only why the leanest does not.
                refused += reasons if fitting else list({reason.method: reason for reason in reasons}.values())
            if best:
                break
        found += best
        rejected += refused if best else _nearest(refused)
    return found, rejected, considered


def _nearest(refused: list[Rejection]) -> list[Rejection]:
    """For each method, the rejection that needs the least memory, or the first if none can run at all."""
    by_method: dict[str, Rejection] = {}
    for rejection in refused:
        known = by_method.get(rejection.method)
        if known is None or _high_bytes(rejection) < _high_bytes(known):
            by_method[rejection.method] = rejection
    return list(by_method.values())


def _high_bytes(rejection: Rejection) -> float:
    return math.inf if rejection.memory is None else rejection.memory.least_bytes


def _has_long_rows(request: Request) -> bool:
    """True if one row takes so much of a card that it should be shared."""
    fixed = {name: value for name, value in request.fixed.items() if name != "micro_batch_size"}
    setup = TrainingSetup(**{"checkpointing": "full", **fixed, "sequence_length": request.sequence_length})
    precisions = ("fp32",) if setup.precision == "fp32" else ("bf16_true", "bf16")
    for policy, precision in itertools.product(dict.fromkeys((setup.checkpointing, "none")), precisions):
        tried = replace(setup, checkpointing=policy, precision=precision)
        with contextlib.suppress(NotRunError):  # others may run
            step = step_bytes(request.model, tried, is_cuda=request.is_cuda)
            return max(step.forward_bytes, step.loss_bytes) > _LONG_ROWS * request.machine.gpu.memory_bytes
    return False


def _plan(request: Request, found: list[Candidate], rejected: list[Rejection], considered: int) -> Plan:
    end_progress()
    return Plan(request, tuple(_rank(found)), tuple(rejected), considered)


def _try(request: Request, options: Iterable[ParallelChoice]) -> tuple[list[Candidate], list[Rejection], int]:
    found: list[Candidate] = []
    rejected: list[Rejection] = []
    considered = 0
    errors: list[NotRunError] = []
    for choice, method in open_choices(request, options):
        try:
            best, rejection, count = _fastest(request, choice, method)
        except NotRunError as error:
            errors.append(error)
            best, rejection, count = None, Rejection(choice.label, method, error.problem), 0
        considered += count
        if best is not None:
            found.append(best)
        else:
            rejected.append(rejection)
    if errors and len(errors) == len(rejected) and not found:
        raise errors[0]
    return found, rejected, considered


def _fastest(request: Request, choice: ParallelChoice, method: str) -> tuple[Candidate | None, Rejection, int]:
    """A strategy's fastest setting that fits, or why the leanest does not, and the number of settings considered.

    Raises:
        NotRunError: if the model's class can take a step with none of them.
    """
    errors: list[NotRunError] = []
    fitting: list[Candidate] = []
    rejection, count = Rejection(choice.label, method, "no micro-batch divides a rank's share of the batch"), 0
    if request.global_batch_size % choice.parallel.data_parallel:
        ranks = choice.parallel.data_parallel
        reason = f"{request.global_batch_size} sequences do not divide among {ranks} data-parallel ranks"
        return None, replace(rejection, reason=reason), 0
    first = None
    for sizes in settings_of(request, choice, method):
        count += len(sizes)
        if first and sizes and sizes[0].checkpointing != first and states_exceed(sizes[0], request):
            continue  # the first policy has shown it
        # Memory grows with the micro-batch: after the first that does not fit, none of the others can.
        for setup in sizes:
            if (why := why_not(setup, request)) is not None:
                rejection = rejection if rejection.memory else replace(rejection, reason=f"{why}.")
                break
            try:
                memory = memory_of(request, setup)
            except NotRunError as error:
                errors.append(error)
                break
            first = first or setup.checkpointing
            if (problem := problem_of(request.machine, setup, memory)) is not None:
                if rejection.memory is None or memory.least_bytes < rejection.memory.least_bytes:
                    rejection = Rejection(choice.label, method, problem, setup, memory)
                break
            fitting.append(Candidate(choice, setup, memory, time_of(request, setup)))
    if errors and not fitting and rejection.memory is None:
        raise errors[0]
    ranked = _rank(fitting)
    return (ranked[0] if ranked else None), rejection, count


def problem_of(machine: Machine, setup: TrainingSetup, memory: MemoryEstimate) -> str | None:
    """Why a setting does not fit; None if it does."""
    # The estimate includes the context and NCCL, so the limit is all the memory that CUDA reports.
    limit = machine.gpu.memory_bytes
    if memory.least_bytes > limit:
        name, size = max(memory.peak_phase.terms, key=lambda term: term[1])
        return (
            f"{format_bytes(memory.least_bytes)} > {format_bytes(limit)}: {name} {format_bytes(size)} "
            f"({setup.checkpointing} checkpointing, micro-batch {setup.micro_batch_size}, {setup.optimizer})"
        )
    ranks = min(machine.num_gpus, machine.gpus_per_node)
    # Ranks that share the model map what one of them built.
    one_loads = setup.parallel.kind.is_fsdp or setup.parallel.is_divided
    stays = setup.parallel.offloads or setup.checkpointing == "offload"
    host = memory.host_bytes * (1 if one_loads and not stays else ranks)
    if machine.host_memory_bytes is not None and host > machine.host_memory_bytes:
        return f"{format_bytes(host)} of host memory > {format_bytes(machine.host_memory_bytes)}"
    return None


def memory_of(request: Request, setup: TrainingSetup) -> MemoryEstimate:
    """Predicted memory on the request's card."""
    limit = request.machine.gpu.memory_bytes
    return predict_memory(request.model, setup, is_cuda=request.is_cuda, limit_bytes=limit)


def time_of(request: Request, setup: TrainingSetup) -> TimeEstimate | None:
    """Predicted time; None if a speed is unknown, which the table shows by a missing time."""
    return known_time(request.model, setup, request.machine, document_length=request.document_length)


def why_no_time(request: Request, setup: TrainingSetup) -> str | None:
    """The speed that is unknown, and the flag that gives it; None if `predict_time` works."""
    try:
        predict_time(request.model, setup, request.machine, document_length=request.document_length)
    except ConfigError as error:
        fix = "give --nvme, like 6GB." if error.place == "nvme" else error.fix
        return f"{error.problem} Fix: {fix}"
    return None


def _rank(found: list[Candidate]) -> list[Candidate]:
    """Fastest first, with the simpler of about equally fast ones first; those of unknown speed last, by simplicity."""
    timed = sorted((c for c in found if c.time is not None), key=lambda c: c.time.step_seconds)  # type: ignore[union-attr]
    ordered: list[Candidate] = []
    while timed:
        bound = timed[0].time.step_seconds * (1 + _TIE)  # type: ignore[union-attr]
        tied = [c for c in timed if c.time.step_seconds <= bound]  # type: ignore[union-attr]
        first = min(tied, key=lambda c: c.simplicity)
        ordered.append(first)
        timed.remove(first)
    unknown = [c for c in found if c.time is None]
    return ordered + sorted(unknown, key=lambda c: (c.simplicity, c.setup.accumulation))
