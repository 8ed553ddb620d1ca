"""The start check's twin under FSDP2: two processes shard it, and the recipe's step must equal the twin's own."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from accel_scale.errors import ConfigError, first_line
from accel_scale.modeling.fsdp2_preparation import modules_that_share
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.optimization.labelled_tokens import skip_unlabelled
from accel_scale.start_check import PlannedRun, Verdict, check_start
from accel_scale.start_check.flash_on_cpu import attention_on_cpu
from accel_scale.start_check.steps import Step, difference, loader_loss, same_draws, take_step
from accel_scale.start_check.twin import undisturbed
from accel_scale.start_check.twin_check import TwinCheck


def process_group() -> None:
    """Initialise the process group of the two processes."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))


def check_sharded(config: PreTrainedConfig) -> dict[str, Any]:
    """Results ``full_fsdp2`` and ``lora_fsdp2``, with packed rows if the model accepts them, else with padded ones."""
    found: dict[str, str] = {}
    rows = "packed"
    for method in ("full", "lora"):
        dist.barrier()
        found[f"{method}_fsdp2"] = _outcome(config, method, rows)
        if method == "full" and found["full_fsdp2"].startswith("refused"):
            rows = "padded"
            found["full_fsdp2"] = _outcome(config, method, rows)
    return found


def _outcome(config: PreTrainedConfig, method: str, rows: str) -> str:
    """The check's decision, as on every rank of a run, and whether the sharded twin then takes the same step."""
    from start_check_scan import outcome, planned

    try:
        run = planned(config, method, rows)
        verdict = check_start(run)
        text = outcome(verdict)
    except ConfigError as error:
        return f"refused: {error.problem}"
    except Exception as error:  # from the configuration, before there is a model
        return f"start check: skipped, {type(error).__name__}: {first_line(error)}"
    if text.startswith("start check: skipped"):
        return text
    try:
        with undisturbed():
            gap = _sharded(dataclasses.replace(run, attention=verdict.attention), verdict)
        return text if gap is None else f"differs: {gap}"
    except Exception as error:  # an engine's error for an architecture is a result
        return f"fails: {type(error).__name__}: {first_line(error)}"


def _sharded(run: PlannedRun, verdict: Verdict) -> str | None:
    """How the sharded twin's step differs from the step of the whole twin; None if it does not."""
    with attention_on_cpu(run.attention) as attention:
        check = TwinCheck(run, attention)
        own = check.own_step()
        sharing = modules_that_share(check.model)
        for module in reversed(list(check.model.modules())):  # nested layers come first
            if isinstance(module, GradientCheckpointingLayer) and id(module) not in sharing:
                fully_shard(module)
        fully_shard(check.model)
        inputs = {name: value for name, value in check.batch.inputs.items() if name != "labels"}
        same_draws()
        with torch.no_grad():
            check.logits = check.model(**inputs, use_cache=False).logits
        check.refuse_leak()
        add_fast_lm_head(check.base, from_logits=verdict.loss_from_logits)
        skip_unlabelled(check.base, verdict.skips_unlabelled)
        gap = difference(_sharded_step(check), own)
        return None if gap.is_small else str(gap)


def _sharded_step(check: TwinCheck) -> Step:
    step = take_step(check.model, check.batch.inputs, loader_loss)
    return Step(step.loss, {name: _whole(gradient) for name, gradient in step.gradients.items()})


def _whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
