"""``--checkpointing_policy auto``, the default on a GPU: the fastest policy that the plan says fits."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError, NotRunError
from accel_scale.facts.names import AUTO_POLICIES
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.planning.cost.strategies import conflict
from accel_scale.planning.cost.timing import known_time
from accel_scale.planning.search.model_parallel import sharing_conflict
from accel_scale.planning.search.search import problem_of
from accel_scale.settings.planned import RunPlan, memory_on, mode_of, planned_as
from accel_scale.settings.planned_setup import SharedModel, recipe_value, target_of
from accel_scale.training.checkpoints.going_on import chosen_before

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.settings.resolved import Resolved

_FLAG = "checkpointing_policy"


def settle_checkpointing(
    settings: Resolved,
    launch: LaunchEnvironment,
    model_config: PreTrainedConfig,
    attention: str,
    say: Callable[[str], None],
    *,
    shared: SharedModel | None = None,
) -> None:
    """Choose the policy of a run if it is left to the plan, here and for the card of ``--plan_gpu``.

    A resumed run keeps its policy. Without a plan it is ``full``.

    Args:
        settings: The resolved flags; the policy is set in them.
        launch: How the process was launched.
        model_config: The model's `PreTrainedConfig`.
        attention: The attention implementation that will run.
        say: Prints one line with the policy and the reason.
        shared: How ranks share the model, if the launch alone does not determine it.

    Raises:
        ConfigError: if the user asked for ``auto`` but turned the plan off.
    """
    for one in filter(None, (settings, settings.on_card)):
        if one.checkpointing_is_open:
            line = _settled(one, settings, launch, model_config, attention, shared)
            if line is not None:
                say(line)


def full_checkpointing(
    model: nn.Module, settings: Resolved, record: MutableMapping[str, object], *, use_reentrant: bool
) -> Callable[[], None] | None:
    """A function that switches `model` to ``full`` when memory runs out; None if the user chose or it is full already.

    Args:
        record: The run's settings as saved in checkpoints: a resumed run starts with the policy that it ended with.
    """
    if "full" not in settings.next_policies:
        return None

    def switch() -> None:
        apply_checkpointing(model, CheckpointingPolicy("full"), use_reentrant=use_reentrant)
        settings.set_checkpointing("full", f"memory ran out with {settings.checkpointing}")
        record[_FLAG] = "full"

    return switch


def _settled(
    one: Resolved,
    settings: Resolved,
    launch: LaunchEnvironment,
    model_config: PreTrainedConfig,
    attention: str,
    shared: SharedModel | None,
) -> str | None:
    """Set the policy of `one` (`settings`, or its equivalent on another card); returns the line to print, if any."""
    resume = settings.values.get("resume", recipe_value(settings, "resume_from_checkpoint"))
    kept = chosen_before(_FLAG, recipe_value(settings, "output_dir"), resume) if one is settings else None
    if kept in AUTO_POLICIES:
        one.next_policies = AUTO_POLICIES[AUTO_POLICIES.index(str(kept)) + 1 :]
        one.set_checkpointing(str(kept), "derived: as the run that goes on has it")
        return f"checkpointing: {kept}, as the run that goes on has it"
    if mode_of(settings) == "off":
        if not one.sources[_FLAG].startswith("derived"):
            raise ConfigError(
                "--checkpointing_policy auto chooses by the plan, and --plan off makes none.",
                place=one.sources[_FLAG],
                fix="remove --plan off, or name a policy.",
            )
        one.set_checkpointing("full", "derived: default on an accelerator without a plan")
        return "checkpointing: full, because nothing is planned"
    asked = (launch, model_config, attention, target_of(settings, launch), shared)
    least = "full"
    try:
        try:
            plan = planned_as(one, *asked)
        except NotRunError:  # a class that is not recomputed
            least = "none"
            one.set_checkpointing(least, "derived: the model's class has no checkpointing")
            plan = planned_as(one, *asked)
        fitting = [found for policy in AUTO_POLICIES if (found := _with_policy(plan, policy)) is not None]
    except ConfigError as error:
        one.set_checkpointing("full", "derived: default on an accelerator without a plan")
        return f"checkpointing: full, because this run cannot be planned: {error.problem}"
    if not fitting:
        one.set_checkpointing(least, "derived: default on an accelerator")
        return None  # the plan refuses the run, or padded rows turn out short enough
    is_timed = all(found.time is not None for found in fitting)
    first, *rest = sorted(fitting, key=_step_seconds) if is_timed else fitting
    why = "the fastest that fits" if is_timed else "the least that fits"
    one.set_checkpointing(first.setup.checkpointing, f"planned: {why}, {first.text}")
    one.next_policies = tuple(found.setup.checkpointing for found in rest)
    return f"checkpointing: {one.checkpointing}, {why}: {first.text}"


def _step_seconds(plan: RunPlan) -> float:
    return plan.time.step_seconds if plan.time is not None else 0.0


def _with_policy(plan: RunPlan, policy: str) -> RunPlan | None:
    """`plan` with another policy; None if that does not fit, or the libraries cannot run it."""
    setup, machine = replace(plan.setup, checkpointing=policy), plan.target.machine
    if conflict(setup, plan.facts) or sharing_conflict(setup, plan.facts):
        return None
    try:
        memory = memory_on(plan.target, plan.facts, setup)
    except NotRunError:
        return None
    if problem_of(machine, setup, memory) is not None:
        return None
    return replace(plan, setup=setup, memory=memory, time=known_time(plan.facts, setup, machine))
