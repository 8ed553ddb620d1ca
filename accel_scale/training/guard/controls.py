"""Choose the control of optimizer steps for an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.parallel.engine import strategy_of
from accel_scale.parallel.model_parallel import model_parallel_of
from accel_scale.training.guard.optimizer_control import StepGate

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from torch.optim import Optimizer


def make_gate(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> StepGate:
    """Create the gate for the engine of `accelerator`.

    Raises:
        ConfigError: if a step can no longer be held back once its gradients exist.
    """
    from accelerate.optimizer import AcceleratedOptimizer

    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} was not prepared, so its steps cannot be skipped.",
            place="guard",
            fix="pass the optimizer that accelerator.prepare returned.",
        )
    inner = type(optimizer.optimizer).__name__
    if accelerator.has_lomo_optimizer or inner in ("LayerWiseDummyOptimizer", "DummyOptim"):
        raise ConfigError(
            f"{inner} changes weights in the backward pass, before the guard can check the step.",
            place="guard",
            fix="use another optimizer, or turn the guard off.",
        )
    strategy = strategy_of(accelerator)
    if strategy.is_model_parallel:
        from accel_scale.training.guard.parallel_control import ParallelGate

        shared = model_parallel_of(accelerator)
        assert shared is not None
        return ParallelGate(accelerator, shared, optimizer)
    if strategy.is_deepspeed:
        from accel_scale.training.guard.deepspeed_control import DeepSpeedGate

        return DeepSpeedGate(accelerator, model, optimizer)
    if strategy.fsdp_version == 1:
        raise ConfigError(
            "steps of FSDP version 1 cannot be guarded.", place="fsdp_version", fix="use fsdp_version: 2."
        )
    return StepGate(accelerator, model, optimizer)
