"""Checks that fused kernels agree with the model's own layers, with steps of the twin on the run's device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError, first_line
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.fused.liger import fuse_layers, fuse_on_cpu, is_installed, why_no_kernels
from accel_scale.modeling.model_class import scores_rows
from accel_scale.settings.planned_setup import recipe_value
from accel_scale.start_check.rows import tiny_batch
from accel_scale.start_check.twin import NoTwin, build_twin, undisturbed
from accel_scale.training.checkpoints.going_on import chosen_before

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from accel_scale.settings.resolved import Resolved
    from accel_scale.start_check.steps import Step

_FLAG = "fused_kernels"
# Policies whose recomputation a kernel could disturb by overwriting its inputs.
_POLICIES = ("none", "full", "selective")


def settle_fused_kernels(
    settings: Resolved,
    config: PreTrainedConfig,
    say: Callable[[str], None],
    *,
    device: torch.device,
    divides_tensors: bool = False,
) -> None:
    """Decide which layers of a run are fused: on a GPU those of Liger's patch, on a CPU the project's own, if the twin
    agrees with them.

    Args:
        settings: Resolved flags; the decision is stored in them.
        config: Configuration of the model that will be loaded.
        say: Prints one line if installed kernels are not used.
        device: Device of this process.
        divides_tensors: Whether tensor parallelism divides the model.

    Raises:
        ConfigError: if ``on`` cannot be honoured.
    """
    wanted, source = settings.scale.fused_kernels, settings.sources.get(_FLAG, "default")
    if wanted == "off":
        return
    on_cpu = settings.launch.device_type == "cpu"
    reason = why_no_kernels(
        device_type=settings.launch.device_type,
        is_installed=is_installed(),
        compiles=bool(recipe_value(settings, "torch_compile")),
        in_tiles=settings.scale.long_rows,
        divides_tensors=divides_tensors,
        of_liger="use_liger_kernel" in source,
    )
    if reason is None and not on_cpu and scores_rows(config):
        reason = "Liger patches models that predict tokens, and this one scores rows"
    is_worth_a_line = reason is None and not on_cpu
    parts: tuple[str, ...] = ()
    resume = settings.values.get("resume", recipe_value(settings, "resume_from_checkpoint"))
    if (
        reason is None
        and wanted == "auto"
        and chosen_before(_FLAG, recipe_value(settings, "output_dir"), resume) == "off"
    ):
        reason = "the run that goes on is without them"
    if reason is None:
        trusts = bool(settings.values.get("trust_remote_code"))
        parts, reason = fused_parts(config, device=device, trusts=trusts, of_liger=not on_cpu)
    if reason is not None and wanted == "on":
        raise ConfigError(
            f"fused kernels cannot be used: {reason}.", place=source, fix="use --fused_kernels auto, or off."
        )
    if reason is None:
        settings.agreed_kernels = parts
        settings.set(_FLAG, "on", "derived: the start check agrees")
        return
    settings.set(_FLAG, "off", f"derived: {reason}")
    if is_worth_a_line:
        say(f"fused kernels: none, the model's own layers are used: {reason}")


def fused_parts(
    config: PreTrainedConfig,
    *,
    device: torch.device,
    trusts: bool = False,
    policies: tuple[str, ...] = _POLICIES,
    of_liger: bool = True,
) -> tuple[tuple[str, ...], str | None]:
    """The parts that can be fused, and the reason if there are none; transformers is left unchanged.

    `of_liger` selects Liger's kernels, otherwise it is this project's layers for CPUs.
    """
    fuse, name = (fuse_layers, "Liger's kernels") if of_liger else (fuse_on_cpu, "the layers for CPUs")
    with undisturbed():
        try:
            own = build_twin(config, attention="eager", trust_remote_code=trusts)
        except NoTwin as obstacle:
            return (), f"{config.model_type} cannot be shrunk ({obstacle}), so they cannot be checked"
        expected = {policy: _step(own, policy, device) for policy in policies}
        if isinstance(expected["none"], str):
            return (), f"the model's own layers do not run in the check: {expected['none']}"
        parts: tuple[str, ...] = ()
        for policy, steps in expected.items():
            if isinstance(steps, str):
                continue  # the model's own layers do not support this policy
            other = copy.deepcopy(own)
            fused = fuse(other, keeps_products=policy == "selective")
            try:
                if not fused.parts:
                    none = "Liger has no patch" if of_liger else "there are none"
                    return (), f"{none} for {config.model_type}"
                reason = _disagreement(name, _step(other, policy, device), steps)
            finally:
                fused.undo()
            if reason is not None:
                return (), reason
            parts = parts or fused.parts
    return parts, None


def _disagreement(name: str, found: Step | str, expected: Step) -> str | None:
    from accel_scale.start_check.steps import difference

    if isinstance(found, str):
        return f"{name} do not run on it: {found}"
    gap = difference(found, expected)
    return None if gap.is_small else f"{name} do not agree with the model's own layers: {gap}"


def _step(model: PreTrainedModel, policy: str, device: torch.device) -> Step | str:
    """A step of `model` under a checkpointing policy, or the reason why it fails."""
    import torch

    from accel_scale.start_check.steps import take_step

    inputs = tiny_batch("lanes", "eager").inputs
    placed = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    try:
        model.to(device)  # type: ignore[arg-type]
        apply_checkpointing(model, CheckpointingPolicy(policy))
        return take_step(model, placed, lambda m, i: m(**i, use_cache=False).loss)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)[:200]}"
