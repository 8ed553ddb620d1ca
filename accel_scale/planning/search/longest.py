"""The longest row that fits on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accel_scale.errors import ConfigError
from accel_scale.planning.search.plan import Plan, Request
from accel_scale.planning.search.search import search

STEP = 256
_MOST = 2**22


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

    best, fits, fails = plan_for(1), 1, (at_most or _MOST) // STEP + 1
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
