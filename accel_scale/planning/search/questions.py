"""Questions besides "what fits": the longest row, the largest batch, the cheapest machine, the effect of a change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.timing import Budget
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.plan import Candidate, Plan, Request
from accel_scale.planning.search.prices import Price
from accel_scale.planning.search.requests import build_request
from accel_scale.planning.search.search import search, why_no_time
from accel_scale.planning.search.wish import SWITCHES, Wish

__all__ = [
    "PlanDifference", "PricedPlan", "cheapest_plans", "compare", "difference", "largest_batch", "longest_row",
    "longest_rows",
]  # fmt: skip

# Rows are as long as a multiple of it.
STEP = 256
_MOST_TOKENS = 2**22
_MOST_ROWS = 2**16
_FACTOR = "x"


@dataclass(frozen=True)
class PricedPlan:
    """A job on one machine of a price table.

    Attributes:
        price: The card, the number of cards, and the price of one per hour.
        best: The fastest setting on it; None if nothing fits or its speed is unknown.
        budget: Hours and cost of the job; None without `best`.
        reason: Why there is no `best`.
    """

    price: Price
    best: Candidate | None = None
    budget: Budget | None = None
    reason: str = ""


@dataclass(frozen=True)
class PlanDifference:
    """The best setting after a change.

    Attributes:
        change: ``flag=value``; empty for the plan that others are compared with.
        best: The best setting; None if nothing fits.
        memory_bytes, step_seconds, tokens_per_second: Values of that setting minus the base's; None if either side
            has none.
        reason: Why nothing fits, or why there is no time.
    """

    change: str
    best: Candidate | None
    memory_bytes: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    reason: str = ""


def longest_row(request: Request) -> Plan:
    """The plan for the longest rows that fit, one on each GPU at a time.

    Raises:
        ConfigError: if not even the shortest fits.
    """
    model = request.model
    return longest_rows(request, at_most=model.max_positions if model.position_params else None)


def largest_batch(request: Request) -> Plan:
    """The plan for the largest micro-batch that fits, with the whole batch in one pass of every GPU.

    Args:
        request: The request, whose global batch and micro-batch are replaced.

    Raises:
        ConfigError: if not even one example fits.
    """
    unit = request.recipe.rows_per_example
    if (generation := request.fixed.get("generation")) is not None:
        raise ConfigError(
            f"answers are written {generation.rows or 'a whole step'} at a time, whatever the micro-batch.",
            place="--largest_batch",
            fix="plan with --global_batch_size.",
        )

    def plan_for(examples: int) -> Plan:
        rows = examples * unit
        fixed = {**request.fixed, "micro_batch_size": rows}
        return search(replace(request, global_batch_size=rows * request.machine.num_gpus, fixed=fixed))

    best, fits, fails = plan_for(1), 1, 2
    if best.best is None:
        raise ConfigError(
            f"not even one example of {request.sequence_length} tokens fits: {_why_nothing(best)}.",
            place="--largest_batch",
            fix="shorten --max_length, or use --method qlora.",
        )
    while fails < _MOST_ROWS and (found := plan_for(fails)).best is not None:
        best, fits, fails = found, fails, 2 * fails
    return last_that_fits(plan_for, best, fits, fails)


def cheapest_plans(wish: Wish, prices: Iterable[Price], tokens: float) -> list[PricedPlan]:
    """The job on every machine of a price table: the cheapest first, those where it does not fit last.

    Args:
        wish: What to train; its card and number of GPUs are replaced.
        prices: Machines to try.
        tokens: Tokens to train on, without padding.
    """
    tried = [_priced(wish, price, tokens) for price in prices]
    return sorted(tried, key=lambda plan: (plan.budget is None, plan.budget.price if plan.budget else 0.0))


def _priced(wish: Wish, price: Price, tokens: float) -> PricedPlan:
    per_node = wish.gpus_per_node or str(min(8, price.num_gpus))
    there = replace(wish, gpu=price.card, num_gpus=str(price.num_gpus), gpus_per_node=per_node)
    try:
        plan = search(build_request(there))
    except ConfigError as error:
        return PricedPlan(price, reason=error.problem)
    timed = [candidate for candidate in plan.candidates if candidate.time is not None]
    if not timed:
        why = "something fits, but a speed is not known (several servers need --network)"
        return PricedPlan(price, reason=why if plan.candidates else _why_nothing(plan))
    best = timed[0]
    assert best.time is not None
    return PricedPlan(price, best, best.time.budget(tokens, price.per_gpu_hour))


def compare(wish: Wish, changes: Sequence[str]) -> list[PlanDifference]:
    """The best setting for `wish`, and for `wish` with each of `changes` on its own.

    Args:
        wish: The base.
        changes: Each ``flag=value``, like ``num_gpus=2`` or ``lora_r=64``; ``max_length=x2`` is twice the base's.

    Raises:
        ConfigError: for a change that is not a flag of a plan, or cannot be planned.
    """
    base = search(build_request(wish))
    differences = [difference("", base, base)]
    for change in changes:
        differences.append(difference(change, search(build_request(changed(wish, base, change))), base))
    return differences


def changed(wish: Wish, base: Plan, change: str) -> Wish:
    """`wish` with one change ``flag=value``.

    Raises:
        ConfigError: if the change cannot be read.
    """
    name, equals, value = change.partition("=")
    name = name.lstrip("-")
    known = [field for field in Wish.__dataclass_fields__ if field not in ("model", "recipe")]
    if not equals or name not in known:
        raise ConfigError(
            f"{change!r} changes nothing that is planned.",
            place="--what_if",
            fix=f"write flag=value with one of {', '.join(known)}.",
        )
    if value.startswith(_FACTOR) and value[1:].isdecimal():
        before = _value_of(name, wish, base)
        if before is None or not before.isdecimal():
            raise ConfigError(f"{name} is no number to multiply.", place="--what_if", fix=f"write {name}=VALUE.")
        value = str(int(before) * int(value[1:]))
    field = Wish.__dataclass_fields__[name]
    if isinstance(field.default, bool):
        if value not in ("true", "false"):
            raise ConfigError(f"{value!r} is neither true nor false.", place="--what_if", fix=f"write {name}=true.")
        return replace(wish, **{name: value == "true"})  # type: ignore[arg-type]
    if isinstance(field.default, tuple):
        return replace(wish, **{name: tuple(value.split(","))})  # type: ignore[arg-type]
    return replace(wish, **{name: value})  # type: ignore[arg-type]


def _value_of(name: str, wish: Wish, base: Plan) -> str | None:
    """The base's value, also for flags that were left open."""
    settled = {
        "max_length": base.request.sequence_length,
        "num_gpus": base.request.machine.num_gpus,
        "gpus_per_node": base.request.machine.gpus_per_node,
    }
    given = getattr(wish, name)
    return given if isinstance(given, str) else str(settled[name]) if name in settled else None


def difference(change: str, plan: Plan, base: Plan) -> PlanDifference:
    """The best setting of `plan`, which is `base` after `change`, compared with the base's."""
    best, first = plan.best, base.best
    if best is None:
        return PlanDifference(change, None, reason=_why_nothing(plan))
    untimed = why_no_time(plan.request, best.setup) or "" if best.time is None else ""
    if first is None:
        return PlanDifference(change, best, reason=untimed)
    memory = best.memory.needed_bytes - first.memory.needed_bytes
    if best.time is None or first.time is None:
        return PlanDifference(change, best, memory, reason=untimed)
    return PlanDifference(
        change,
        best,
        memory,
        best.time.step_seconds - first.time.step_seconds,
        best.time.tokens_per_second - first.time.tokens_per_second,
    )


def _why_nothing(plan: Plan) -> str:
    miss = plan.nearest_miss or (plan.rejections[0] if plan.rejections else None)
    return "nothing can run" if miss is None else f"{miss.method}: {miss.reason}".rstrip(".")


def settings_of(setup: TrainingSetup, switches: Sequence[str] = SWITCHES) -> str:
    """The parts of a setting that a plan chooses, in one line."""
    parts = [f"{setup.micro_batch_size} × {setup.accumulation}", setup.checkpointing, setup.optimizer]
    return ", ".join([*parts, *(name for name in switches if getattr(setup, name))])


def longest_rows(request: Request, *, at_most: int | None = None) -> Plan:
    """The plan for the longest rows that fit, in multiples of `STEP` tokens, at one row at a time.

    Args:
        request: The request, whose length, global batch and micro-batch are replaced.
        at_most: Maximum number of tokens in a row; None: as many as fit.

    Raises:
        ConfigError: if not even `STEP` tokens fit.
    """
    request = replace(
        request, global_batch_size=request.machine.num_gpus, fixed={**request.fixed, "micro_batch_size": 1}
    )

    def plan_for(steps: int) -> Plan:
        return search(replace(request, sequence_length=steps * STEP))

    best, fits, fails = plan_for(1), 1, (at_most or _MOST_TOKENS) // STEP + 1
    if best.best is None:
        reasons = "; ".join(f"{rejection.method}: {rejection.reason}" for rejection in best.rejections[:1])
        raise ConfigError(
            f"not even a row of {STEP} tokens fits: {reasons}.",
            place="--max_length longest",
            fix="take a smaller model, --method qlora, or more cards.",
        )
    return last_that_fits(plan_for, best, fits, fails)


def last_that_fits(plan_for: Callable[[int], Plan], best: Plan, fits: int, fails: int) -> Plan:
    """Bisect for the plan of the largest number that fits. `best` is the plan for `fits`; `fails` is too large."""
    while fails - fits > 1:
        middle = (fits + fails) // 2
        found = plan_for(middle)
        if found.best is None:
            fails = middle
        else:
            best, fits = found, middle
    return best
