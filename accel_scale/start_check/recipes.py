"""Builds the start check's request from each recipe's flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.facts.strategies import strategy_named
from accel_scale.modeling.attention import score_matrix_note
from accel_scale.optimization.router_loss import refuse_shared_model
from accel_scale.start_check.check import check_start
from accel_scale.start_check.plan import PlannedRun, PolicyRefused, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from accel_scale.flags.pretraining import PretrainModelArguments
    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.parallel.layout import ParallelLayout
    from accel_scale.settings.planned_setup import SharedModel
    from accel_scale.settings.resolved import Resolved
    from accel_scale.settings.trl_config import RecipeModelConfig


def settle_open(
    settings: Resolved,
    launch: LaunchEnvironment,
    config: PreTrainedConfig,
    attention: str,
    say: Callable[[str], None],
    *,
    shared: SharedModel | None = None,
) -> None:
    """Settle the automatic choices: fused kernels, then the checkpointing that is needed with them.

    Raises:
        ConfigError: as `settle_fused_kernels` and `settle_checkpointing`.
    """
    import torch

    from accel_scale.settings.planned_checkpointing import settle_checkpointing
    from accel_scale.start_check.fused import settle_fused_kernels

    kind = settings.launch.device_type
    device = torch.device(kind, launch.local_rank) if kind == "cuda" else torch.device(kind)
    divides = launch.parallel.tensor_parallel_size > 1 or (shared is not None and shared.layout.tp > 1)
    settle_fused_kernels(settings, config, say, device=device, divides_tensors=divides)
    settle_checkpointing(settings, launch, config, attention, say, shared=shared)
    if settings.fused_label and kind != "cpu":
        say(f"fused kernels: {settings.fused_label}, which agree with the model's own layers")


def check_sft_start(
    settings: Resolved,
    model_args: RecipeModelConfig,
    config: PreTrainedConfig,
    attention: str,
    *,
    say: Callable[[str], None],
) -> Verdict:
    """Check the start of a run with one of TRL's trainers; notes for the user are printed, one line each.

    For preference losses it compares log-probabilities by TRL's head, for a reward model the scores. The reference
    model needs no separate check: it is the same model without gradients.

    Raises:
        ConfigError: as `check_start`.
    """
    from accel_scale.settings.model_settings import settle_adapters
    from accel_scale.settings.planned_setup import recipe_value

    values, adapter = settings.values, settle_adapters(settings, model_args, config, say)
    recipe = settings.recipe
    log_probs = recipe.loss == "log_probs" and not recipe.generates
    of_preferences = log_probs or recipe.rewards
    packs = bool(recipe_value(settings, "packing") or (values.get("padding_free") and not of_preferences))
    launched = strategy_named(settings.launch.strategy)
    planned = PlannedRun(
        config=config,
        attention=attention,
        attention_given=bool(model_args.attn_implementation),
        rows="packed" if packs else "padded",
        policy=settings.checkpointing,
        use_reentrant=settings.use_reentrant or launched.needs_reentrant(adapters=adapter is not None),
        adapter=adapter,
        targets_given=bool(values.get("lora_target_modules")),
        trust_remote_code=bool(values.get("trust_remote_code")),
        # TRL adds the router loss to a preference loss itself: only log-probabilities are compared with the model's.
        router_loss=0.0 if of_preferences else _router_loss(config, values.get("router_aux_loss_coef")),
        log_probs=log_probs,
        rewards=recipe.rewards,
        images=recipe.has_images,
        packing_flag="--packing false --padding_free false" if values.get("padding_free") else "--packing false",
    )
    return _said(planned, settings, say)


def check_pretrain_start(
    settings: Resolved,
    model_args: PretrainModelArguments,
    config: PreTrainedConfig,
    attention: str,
    *,
    isolate_documents: bool,
    layout: ParallelLayout,
    say: Callable[[str], None],
) -> Verdict:
    """Check the start of a pretraining run; notes for the user are printed, one line each.

    Raises:
        ConfigError: as `check_start`, or if ranks share the model and the loss needs the whole logits.
    """
    from accel_scale.settings.model_settings import settle_adapters

    adapter = settle_adapters(settings, model_args, config, say)
    planned = PlannedRun(
        config=config,
        attention=attention,
        attention_given=bool(model_args.attn_implementation),
        rows="lanes" if isolate_documents else "stream",
        policy=settings.checkpointing,
        use_reentrant=strategy_named(settings.launch.strategy).needs_reentrant(adapters=adapter is not None),
        adapter=adapter,
        targets_given="lora_target_modules" in settings.sources,
        trust_remote_code=model_args.trust_remote_code,
        packing_flag="--isolate_documents false",
    )
    refuse_shared_model(config, is_plain=layout.is_plain)
    verdict = _said(planned, settings, say)
    if verdict.loss_from_logits and not layout.is_plain:
        raise ConfigError(
            f"{config.model_type}'s head is more than one matrix product, which ranks cannot share.",
            place="--tp_size, --pp_size and --sp_size",
            fix="leave them out, and use FSDP2 or ZeRO.",
        )
    return verdict


def _router_loss(config: PreTrainedConfig, given: float | None) -> float:
    """The weight that TRL gives to the router's auxiliary loss; 0 for a model without router logits."""
    text = config.get_text_config()
    if not hasattr(text, "output_router_logits"):
        return 0.0
    return float(getattr(text, "router_aux_loss_coef", 0.0) if given is None else given)


def _said(planned: PlannedRun, settings: Resolved, say: Callable[[str], None]) -> Verdict:
    from peft import LoraConfig

    from accel_scale.modeling.adapters import leave_out

    try:
        verdict = check_start(planned)
    except PolicyRefused:
        if not settings.next_policies:
            raise
        refused, (policy, *heavier) = settings.checkpointing, settings.next_policies
        settings.set_checkpointing(policy, f"planned, and {refused} does not leave the model's gradients as they are")
        settings.next_policies = tuple(heavier)
        say(f"checkpointing: {policy}, because {refused} does not leave the model's gradients as they are")
        return _said(dataclasses.replace(planned, policy=settings.checkpointing), settings, say)
    device, dtype = settings.launch.device, settings.precision.compute_dtype
    scores = score_matrix_note(verdict.attention, device=device, dtype=dtype, model_config=planned.config)
    for note in [*verdict.notes, *filter(None, [scores])]:
        say(f"note: {note}")
    if isinstance(planned.adapter, LoraConfig):
        leave_out(planned.adapter, verdict.exclude_modules)
    return dataclasses.replace(verdict, use_reentrant=planned.use_reentrant, adapter=planned.adapter)
