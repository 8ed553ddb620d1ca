"""The start check's twin under FSDP2: two processes shard it and take the recipe's step, which must equal its own."""

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
from accel_scale.start_check import check_start
from accel_scale.start_check.flash_on_cpu import attention_on_cpu
from accel_scale.start_check.steps import Step, difference, same_draws, take_step
from accel_scale.start_check.twin import NoTwin, undisturbed
from accel_scale.start_check.twin_check import TwinCheck, recipe_loss


def process_group() -> None:
    """The two processes' group."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))


def check_sharded(config: PreTrainedConfig) -> dict[str, Any]:
    """{"full_fsdp2": …, "lora_fsdp2": …}: with packed rows where the model takes them, else with padded ones."""
    found: dict[str, str] = {}
    for method in ("full", "lora"):
        for rows, attention in (("packed", None), ("padded", None), ("padded", "sdpa"), ("padded", "eager")):
            dist.barrier()
            text, before = _outcome(config, method, rows, attention), found.get(f"{method}_fsdp2", "")
            if attention is None or not text.startswith("start check"):
                found[f"{method}_fsdp2"] = text
            if not text.startswith("refused") or (attention is None and "not causal" in before + text):
                break
    return found


def _outcome(config: PreTrainedConfig, method: str, rows: str, attention: str | None) -> str:
    try:
        with undisturbed():
            text = _sharded(config, method, rows, attention)
            if text.startswith("differs"):
                _whole_is_accepted(config, method, rows)
            return text
    except ConfigError as error:
        return f"refused: {error.problem}"
    except NoTwin as reason:
        return f"start check: skipped, {reason}"
    except Exception as error:  # what the engine says about an architecture is a result
        return f"fails: {type(error).__name__}: {first_line(error)}"


def _whole_is_accepted(config: PreTrainedConfig, method: str, rows: str) -> None:
    """ConfigError where the check refuses the model unsharded as well, as it does on every rank of a run."""
    from start_check_scan import planned

    check_start(planned(config, method, rows))


def _sharded(config: PreTrainedConfig, method: str, rows: str, attention_name: str | None) -> str:
    from start_check_scan import planned

    run = planned(config, method, rows)
    if attention_name is not None:
        run = dataclasses.replace(run, attention=attention_name)
    with attention_on_cpu(run.attention) as attention:
        check = TwinCheck(run, attention)
        own = check.own_step()
        sharing = modules_that_share(check.model)
        for module in reversed(list(check.model.modules())):  # a layer in a layer comes first
            if isinstance(module, GradientCheckpointingLayer) and id(module) not in sharing:
                fully_shard(module)
        fully_shard(check.model)
        inputs = {name: value for name, value in check.batch.inputs.items() if name != "labels"}
        same_draws()
        with torch.no_grad():
            check.logits = check.model(**inputs, use_cache=False).logits
        check.refuse_leak()
        seen = ""
        for from_logits in (False, True):
            add_fast_lm_head(check.base, from_logits=from_logits)
            try:
                gap = difference(_sharded_step(check), own)
            except Exception as error:  # a head that the recipe does not know
                seen = f"{type(error).__name__}: {first_line(error)}"
                continue
            if gap.is_small:
                return "own logits" if from_logits else "equal"
            seen = str(gap)
    return f"differs: {seen}"


def _sharded_step(check: TwinCheck) -> Step:
    step = take_step(check.model, check.batch.inputs, recipe_loss)
    return Step(step.loss, {name: _whole(gradient) for name, gradient in step.gradients.items()})


def _whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
