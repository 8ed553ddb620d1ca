"""A plan as JSON: every prediction, in bytes and seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from accel_scale.planning.search.branches import branch_of
from accel_scale.planning.search.search import Candidate, Plan, Rejection
from accel_scale.planning.search.writing import WrittenPlan
from accel_scale.reporting.plan_tables import Budgeted, candidate_dict, nothing_fits, time_notes


def as_dict(plan: Plan, budget: Budgeted, notes: Sequence[str], written: WrittenPlan | None) -> dict[str, Any]:
    """The whole plan as a JSON-serialisable dictionary."""
    request = plan.request
    document: dict[str, Any] = {
        "model": {"name": request.model.name, "num_params": request.model.num_params},
        "machine": dataclasses.asdict(request.machine),
        "global_batch_size": request.global_batch_size,
        "sequence_length": request.sequence_length,
        "document_length": request.document_length,
        "methods": request.methods,
        "num_considered": plan.num_considered,
        "candidates": [_candidate(candidate, budget) for candidate in plan.candidates],
        "rejections": [_rejection(rejection) for rejection in plan.rejections],
        "notes": [*notes, *time_notes(plan)],
    }
    if plan.best is not None:
        document["branch"] = branch_of(plan.best.setup).name
    else:
        document["remedies"] = nothing_fits(plan)
    if written is not None:
        files = [str(path) for path in written.files]
        document["written"] = {"files": files, "run": written.command, "rehearse": written.rehearsal}
    return document


def _candidate(candidate: Candidate, budget: Budgeted) -> dict[str, Any]:
    time, found = candidate.time, candidate_dict(candidate)
    if time is not None and budget.tokens is not None:
        found["budget"] = dataclasses.asdict(time.budget(budget.tokens, budget.price_per_gpu_hour))
    return found


def _rejection(rejection: Rejection) -> dict[str, Any]:
    return {
        "strategy": rejection.label,
        "method": rejection.method,
        "reason": rejection.reason,
        "setup": None if rejection.setup is None else dataclasses.asdict(rejection.setup),
        "memory": None if rejection.memory is None else rejection.memory.as_dict(),
    }
