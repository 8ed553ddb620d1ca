"""The start check of a run, retried with another attention if the chosen one fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.attention import check_can_isolate
from accel_scale.start_check.plan import AttentionRefused, Crashed, PlannedRun, Verdict


def check_start(run: PlannedRun) -> Verdict:
    """Train a small model of `run` for one step in every way that must agree, before anything large is loaded.

    It runs in fp32 on the CPU, in this process alone whatever the strategy, so every rank gets the same answer. It
    finds a logit factor of 0.98, a cap of 50, a document that sees another one through a mask, a state, a convolution
    or the rows of its micro-batch, a token that sees the next one, gradients that recomputation changes by 0.2%, and
    weights that no gradient reaches.

    Raises:
        ConfigError: if the run would not train what it states, naming the setting to change.
    """
    from accel_scale.start_check.twin import NoTwin, undisturbed

    with undisturbed():
        try:
            return _verdict(run)
        except NoTwin as reason:
            return _skipped(run, f"{run.config.model_type} cannot be shrunk ({reason}).")
        except AttentionRefused as refusal:
            return _with_other_attention(run, refusal)


def _skipped(run: PlannedRun, why: str) -> Verdict:
    if run.packs:
        check_can_isolate(run.config, run.packing_flag)
    return Verdict(run.attention, notes=(f"start check: skipped, {why}",))


def _verdict(run: PlannedRun) -> Verdict:
    from accel_scale.start_check.flash_on_cpu import attention_on_cpu
    from accel_scale.start_check.reward_check import RewardTwinCheck
    from accel_scale.start_check.twin_check import TwinCheck

    with attention_on_cpu(run.attention) as attention:
        return (RewardTwinCheck if run.rewards else TwinCheck)(run, attention).verdict()


def _with_other_attention(run: PlannedRun, refusal: AttentionRefused) -> Verdict:
    """The verdict with transformers' own attention, unless the user chose one; else raise the refusal with a fix."""
    from accel_scale.start_check.twin import NoTwin

    fix = refusal.fix
    for other, flag in _alternatives(run):
        is_for_us = other.rows == run.rows and not run.attention_given
        try:
            verdict = _verdict(other)
        except (AttentionRefused, NoTwin):
            continue
        except ConfigError:
            if is_for_us:
                raise
            verdict = None
        if is_for_us and verdict is not None:
            note = f"attention is {other.attention}: {str(refusal.problem).rstrip('.')}."
            return dataclasses.replace(verdict, notes=(note, *verdict.notes))
        fix = f"use {flag}."
        break
    if fix is None and isinstance(refusal, Crashed):
        return _without_running(run, refusal)
    raise ConfigError(refusal.problem, place=refusal.place, fix=fix or "train another model.") from refusal


def _without_running(run: PlannedRun, refusal: Crashed) -> Verdict:
    """Handle a twin that cannot take a step: find out if its adapters or the router loss are the cause."""
    if run.router_loss and _is_accepted(dataclasses.replace(run, router_loss=0.0)):
        raise ConfigError(refusal.problem, place="--router_aux_loss_coef", fix="use 0.") from refusal
    if run.adapter is None or not _is_accepted(
        dataclasses.replace(run, adapter=None, policy=CheckpointingPolicy("none"))
    ):
        return _skipped(run, refusal.problem)
    raise ConfigError(
        f"these adapters do not go with the model: {refusal.problem}",
        place="--lora_target_modules",
        fix="name the attention's projections, such as q_proj k_proj v_proj o_proj.",
    ) from refusal


def _is_accepted(run: PlannedRun) -> bool:
    try:
        _verdict(run)
    except ConfigError:
        return False
    return True


def _alternatives(run: PlannedRun) -> Iterable[tuple[PlannedRun, str]]:
    for name in ("sdpa", "eager"):
        if name != run.attention:
            yield dataclasses.replace(run, attention=name), f"--attn_implementation {name}"
    if run.packs:
        rows: Any = "padded" if run.rows == "packed" else "stream"
        yield dataclasses.replace(run, rows=rows), f"{run.packing_flag}, which switches packing off"
