"""The strategy that a run trains under."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.facts.strategies import Strategy, strategy_named

if TYPE_CHECKING:
    from accelerate import Accelerator


def strategy_of(accelerator: Accelerator) -> Strategy:
    """How `accelerator` splits the run; model parallelism takes precedence over the engine beside it."""
    return strategy_named(_name(accelerator))


def _name(accelerator: Accelerator) -> str:
    from accelerate.utils import DistributedType

    from accel_scale.parallel.model_parallel import model_parallel_of

    if model_parallel_of(accelerator) is not None:
        return "model_parallel"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    return "ddp" if accelerator.num_processes > 1 else "single"
