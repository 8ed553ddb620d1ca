"""``--plan auto``: choose micro-batch, accumulation, checkpointing, optimizer and method if left open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.device import device_named
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import AUTO_POLICY, METHODS
from accel_scale.facts.optimizer_specs import LEAN_OPTIMIZERS, OPTIMIZERS
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.planning.cost.strategies import ParallelChoice
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.recipe_choices import SFT_PLAN, PlannedRecipe
from accel_scale.planning.search.search import Candidate, Request, search
from accel_scale.settings.planned import RunPlan, planned_as, predict, size_text
from accel_scale.settings.planned_setup import recipe_value, target_of
from accel_scale.settings.resolve import resolve, set_usual_schedule
from accel_scale.settings.resolved import LaunchFacts, Resolved
from accel_scale.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from accel_scale.launching.environment import LaunchEnvironment

# Each group is chosen as a whole: once the user sets one of its flags, the others follow from it.
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
_CHECKPOINTING = ("checkpointing_policy", *_SWITCHES, *(f"{switch}_kwargs" for switch in _SWITCHES))
_OPTIMIZER = ("optim", "optim_args")
_METHOD = ("method", "use_peft", "load_in_4bit", "load_in_8bit")
# The largest in memory first: settings that train like the default are kept as long as they fit.


def resolve_planned(
    parsed: ParsedFlags,
    facts: LaunchFacts,
    launch: LaunchEnvironment,
    *,
    preset: Mapping[str, Any] | None = None,
    recipe: PlannedRecipe = SFT_PLAN,
) -> Resolved:
    """`resolve`, but with ``--plan auto`` open settings are first chosen by what fits and is fastest.

    The global batch and the launch file's strategy stay. Full fine-tuning comes before LoRA and QLoRA, and fp32
    optimizer states before 8-bit ones: each gives way only where it does not fit.

    Raises:
        ConfigError: as `resolve`; if nothing fits, or the model is not one that can be planned for.
    """
    if parsed.explicit.get("plan") != "auto":
        return _resolve_for_both(parsed, facts, preset, recipe)
    if parsed.explicit.get("checkpointing_policy") == AUTO_POLICY:
        parsed = replace(parsed, explicit={k: v for k, v in parsed.explicit.items() if k != "checkpointing_policy"})
    seeded = parsed
    if _sets(parsed, ("global_batch_size",)) and not _sets(parsed, _BATCH):
        # Any micro-batch that divides it will do until one is chosen.
        seeded = replace(parsed, explicit={**parsed.explicit, "per_device_train_batch_size": 1})
    open_settings = _resolve_for_both(seeded, facts, preset, recipe)
    config = _config_of(open_settings)
    plan = _open_plan(open_settings, launch, config)
    chosen = _choose(plan, parsed, launch, facts)
    values = _flags_of(chosen.setup, parsed, plan.rows_per_example)
    origin = f"planned: fits {format_bytes(plan.limit_bytes)} ({plan.target.machine.gpu.name})"
    explicit, origins = {**parsed.explicit, **values}, {**parsed.origins, **dict.fromkeys(values, origin)}
    settings = _resolve_for_both(replace(parsed, explicit=explicit, origins=origins), facts, preset, recipe)
    settings.notes.append(_line(values, chosen, plan))
    settings.model_config = config
    return settings


def _resolve_for_both(
    parsed: ParsedFlags, facts: LaunchFacts, preset: Mapping[str, Any] | None, recipe: PlannedRecipe
) -> Resolved:
    """The settings here and, if ``--plan_gpu`` names a card and this is not a GPU, those that the card would get."""
    settings = resolve(parsed, facts, preset=preset)
    set_usual_schedule(settings)
    settings.recipe = recipe
    card = settings.scale.plan_gpu
    if card and facts.device_type != "cuda":
        there = replace(facts, device=device_named(card, place=parsed.place("plan_gpu")))
        settings.on_card = replace(resolve(parsed, there, preset=preset), recipe=recipe)
    return settings


def _config_of(settings: Resolved) -> PreTrainedConfig:
    from accel_scale.data.default import default_model_path
    from accel_scale.modeling.loading import load_config

    values = settings.values
    return load_config(
        values.get("model_name_or_path") or default_model_path(),
        revision=values.get("model_revision", "main"),
        trust_remote_code=bool(values.get("trust_remote_code")),
        dropout=settings.scale.model_dropout,
        rewards=settings.recipe.rewards,
    )


def _open_plan(settings: Resolved, launch: LaunchEnvironment, config: PreTrainedConfig) -> RunPlan:
    """The plan of the run with defaults for everything that is open."""
    from accel_scale.modeling.attention import resolve_attention

    values = settings.values
    attention = resolve_attention(
        values.get("attn_implementation"),
        device=settings.launch.device,
        dtype=settings.precision.compute_dtype,
        packing=bool(recipe_value(settings, "packing") or values.get("padding_free")),
        model_config=config,
    )
    return planned_as(settings.on_card or settings, launch, config, attention, target_of(settings, launch))


def _sets(parsed: ParsedFlags, names: tuple[str, ...]) -> bool:
    return any(parsed.explicit.get(name) is not None for name in names)


def _choose(plan: RunPlan, parsed: ParsedFlags, launch: LaunchEnvironment, facts: LaunchFacts) -> Candidate:
    setup, parallel = plan.setup, plan.setup.parallel
    fixed = {name: getattr(setup, name) for name in _KEPT}
    if setup.generation is not None:
        fixed["generation"] = replace(setup.generation, rows=0)
    if _sets(parsed, _BATCH):
        fixed["micro_batch_size"] = setup.micro_batch_size
    if parsed.explicit.get("sync_each_batch") is not None:
        fixed["sync_each_batch"] = setup.sync_each_batch
    if _sets(parsed, _CHECKPOINTING) or setup.long_rows:
        fixed["checkpointing"] = setup.checkpointing
    reason = "nothing is left to choose"
    for method, optimizer in _dearest_first(setup, parsed, launch, facts):
        found = search(
            Request(
                plan.facts,
                plan.target.machine,
                global_batch_size=setup.global_batch_size,
                sequence_length=setup.sequence_length,
                methods=(method,),
                fixed={**fixed, "optimizer": optimizer},
                choices=(ParallelChoice(launch.parallel.label, parallel, 0),),
                is_cuda=plan.target.is_cuda,
                recipe=replace(SFT_PLAN, rows_per_example=plan.rows_per_example),
            )
        )
        if found.best is not None:
            return found.best
        reason = found.rejections[0].reason if found.rejections else reason
    leanest = replace(setup, method=method, optimizer=optimizer, checkpointing=fixed.get("checkpointing", "full"))
    if "micro_batch_size" not in fixed:
        rows = plan.least_rows
        accumulation = setup.accumulation * setup.micro_batch_size // rows
        leanest = replace(leanest, micro_batch_size=rows, accumulation=accumulation)
    if leanest.trains_adapters:
        leanest = replace(leanest, reference_model=False)
    raise ConfigError(
        f"nothing that is left open makes this run fit: {reason}.",
        place=plan.place,
        fix=predict(plan.facts, leanest, plan.target).remedies(),
    )


_KEPT = (
    "precision",
    "attention",
    "long_rows",
    "fused",
    "loss",
    "packing",
    "mean_length",
    "lora",
    "double_quantisation",
    "compile",
    "reference_model",
    "reference_pass",
    "kl_rows",
    "vllm",
)


def _dearest_first(
    setup: TrainingSetup, parsed: ParsedFlags, launch: LaunchEnvironment, facts: LaunchFacts
) -> Iterator[tuple[str, str]]:
    """Methods and optimizers that are open, the closest to the defaults first."""
    from accel_scale.optimization.optimizers import check_optimizer

    for method in (setup.method,) if _sets(parsed, _METHOD) else METHODS:
        if _sets(parsed, _OPTIMIZER):
            yield method, setup.optimizer
            continue
        yield method, LEAN_OPTIMIZERS[0]
        if METHOD_FACTS[method].trains_adapters:
            continue  # adapters' states are too small to matter
        for optimizer in LEAN_OPTIMIZERS[1:]:
            if not OPTIMIZERS[optimizer].whole_checkpoints and launch.parallel.saves_whole_checkpoints:
                continue  # such checkpoints could not be resumed
            try:
                check_optimizer(
                    optimizer,
                    device_type="cuda" if parsed.explicit.get("plan_gpu") else facts.device_type,
                    strategy=facts.strategy,
                    offload_optimizer=launch.parallel.offloads_optimizer,
                    precision=setup.precision,
                )
            except ConfigError:
                continue  # it does not run here
            yield method, optimizer


def _flags_of(setup: TrainingSetup, parsed: ParsedFlags, rows_per_example: int) -> dict[str, Any]:
    """The open flags, with the values of `setup`; batch sizes count examples."""
    values: dict[str, Any] = {}
    if not _sets(parsed, _BATCH):
        values["per_device_train_batch_size"] = setup.micro_batch_size // rows_per_example
        if not _sets(parsed, ("global_batch_size",)):
            values["gradient_accumulation_steps"] = setup.accumulation
    if setup.sync_each_batch and parsed.explicit.get("sync_each_batch") is None:
        values["sync_each_batch"] = True
    if not _sets(parsed, _CHECKPOINTING):
        values["checkpointing_policy"] = setup.checkpointing
    if not _sets(parsed, _OPTIMIZER):
        values["optim"] = setup.optimizer
    if not _sets(parsed, _METHOD):
        values["method"] = setup.method
    return values


def _line(values: Mapping[str, Any], chosen: Candidate, plan: RunPlan) -> str:
    said = ", ".join(f"--{name} {value}" for name, value in values.items()) or "nothing, all was set"
    size = size_text(chosen.memory)
    return f"planned: {said}; predicted {size} of {format_bytes(plan.limit_bytes)} ({plan.target.machine.gpu.name})"
