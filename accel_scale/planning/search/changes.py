"""Single changes that would make a setting fit."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.errors import NotRunError
from accel_scale.facts import hardware
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.optimizer_specs import LEAN_OPTIMIZERS
from accel_scale.planning.cost.strategies import choices
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.search import Request, memory_of, problem_of, time_of
from accel_scale.planning.search.settings import why_not

_ADAPTER_METHODS = tuple(name for name, facts in METHOD_FACTS.items() if facts.trains_adapters)


def cheapest_changes(
    request: Request, setup: TrainingSetup, count: int = 3, *, policy_is_open: bool = False
) -> list[tuple[str, TrainingSetup]]:
    """Up to `count` single changes to `setup` that would make it fit, cheapest in time first.

    Args:
        policy_is_open: Whether the checkpointing policy may change, too, because nobody asked for it.
    """
    policies = dict.fromkeys(("full", setup.checkpointing) if policy_is_open else (setup.checkpointing,))
    methods = [m for m in _ADAPTER_METHODS if m != setup.method]
    other_methods = [
        replace(setup, method=m, checkpointing=p, reference_model=False) for p in policies for m in methods
    ]
    changes = [
        ("--per_device_train_batch_size", _smaller_batches(setup, request.recipe.rows_per_example)),
        ("--sync_each_batch", [replace(setup, sync_each_batch=True)] if setup.accumulation > 1 else []),
        (
            "--checkpointing_policy",
            [replace(setup, checkpointing=p) for p in ("selective", "full", "segments_2", "offload")],
        ),
        ("--long_rows", [replace(setup, long_rows=True, checkpointing=p) for p in (setup.checkpointing, "offload")]),
        ("--optim", [replace(setup, optimizer=o) for o in reversed(LEAN_OPTIMIZERS[1:])]),
        ("--method", other_methods),
    ]
    options = choices(request.machine.num_gpus, request.machine.gpus_per_node)
    launch = [replace(setup, parallel=c.parallel) for c in options if c.parallel != setup.parallel]
    if setup.parallel.model_parallel > 1:
        launch = []  # other launches have other global batches
    fitting: list[tuple[float, int, str, TrainingSetup]] = []
    for flag, setups in [*changes, ("launch file", launch)]:
        for changed in setups:
            if changed == setup or why_not(changed, request) is not None:
                continue
            try:
                memory = memory_of(request, changed)
            except NotRunError:
                continue
            if problem_of(request.machine, changed, memory) is None:
                time = time_of(request, changed)
                fitting.append((time.step_seconds if time else 0.0, len(fitting), flag, changed))
                break
    fitting.sort(key=lambda item: item[:2])
    return [(flag, changed) for _, _, flag, changed in fitting[:count]]


def as_flag(flag: str, setup: TrainingSetup) -> str | None:
    """A change of `cheapest_changes` as flag and value; None for micro-batch and launch, which callers describe."""
    values = {
        "--checkpointing_policy": setup.checkpointing,
        "--optim": setup.optimizer,
        "--method": setup.method,
        "--sync_each_batch": "true",
        "--long_rows": "true" + " --checkpointing_policy offload" * (setup.checkpointing == "offload"),
    }
    return f"{flag} {values[flag]}" if flag in values else None


def launch_label(setup: TrainingSetup, machine: hardware.Machine) -> str:
    """The label that `choices` gives the launch of `setup`."""
    options = choices(machine.num_gpus, machine.gpus_per_node)
    return next(choice.label for choice in options if choice.parallel == setup.parallel)


def _smaller_batches(setup: TrainingSetup, rows_per_example: int) -> list[TrainingSetup]:
    sizes = []
    size = setup.micro_batch_size
    while size > rows_per_example and size % (2 * rows_per_example) == 0:
        size //= 2
        accumulation = setup.accumulation * setup.micro_batch_size // size
        sizes.append(replace(setup, micro_batch_size=size, accumulation=accumulation))
    return sizes
