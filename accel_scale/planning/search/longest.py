"""The longest row that a card takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accel_scale.errors import ConfigError
from accel_scale.planning.search.plan import Plan, Request
from accel_scale.planning.search.search import search

STEP = 256
_MOST = 2**22


def longest_rows(request: Request, *, at_most: int | None = None) -> Plan:
    """The plan for the longest rows, a multiple of `STEP` tokens, for which something fits, at one row at a time.

    Args:
        request: Its length, its global batch and its micro-batch are replaced.
        at_most: Tokens that a row may have; None: as many as fit.

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
    """The plan for the largest number for which something fits: `best` is the one for `fits`; `fails` is too large."""
    while fails - fits > 1:
        middle = (fits + fails) // 2
        found = plan_for(middle)
        if found.best is None:
            fails = middle
        else:
            best, fits = found, middle
    return best
