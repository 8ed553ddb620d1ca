"""Control DeepSpeed's ZeRO stages between gradients and optimizer: the only module that uses their internals.

Checked on deepspeed 0.19.8 and accelerate 1.15.0; tests/unit/test_deepspeed_gate.py fails if anything changes.
`DeepSpeedEngineWrapper.backward` steps at once, so gradients could not be judged; here the engine's backward and its
step are two calls. A step is dropped through DeepSpeed's own path for an fp16 overflow, which frees gradients of every
kind (partitions, offloaded buffers, accumulators) and counts the step as skipped; only the loss scale is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

from accel_scale.errors import ConfigError
from accel_scale.training.guard.optimizer_control import StepGate, lowered

# Attributes used of each optimizer class; a DeepSpeed version that lacks one is refused.
_STAGE_1_AND_2 = ("check_overflow", "check_grad_overflow", "scaled_global_norm", "averaged_gradients")
_STAGE_3 = ("_overflow_check_and_loss_scale_update", "_get_norm_groups", "averaged_gradients")
_BOTH = ("_update_scale", "loss_scale", "clip_grad", "overflow", "step", "param_groups")


class DeepSpeedGate(StepGate):
    """ZeRO-1, ZeRO-2 and ZeRO-3, with or without offloading.

    Raises:
        ConfigError: if the engine's steps cannot be skipped.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        super().__init__(accelerator, model, optimizer)
        self._wrapper = accelerator.deepspeed_engine_wrapped
        self._engine = self._wrapper.engine
        self._zero = self._engine.optimizer
        self._is_stage_3 = self._engine.zero_optimization_partition_weights()
        self._check()

    def _check(self) -> None:
        import deepspeed
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        if type(self._zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
            raise ConfigError(
                f"steps of DeepSpeed's {type(self._zero).__name__} cannot be skipped.",
                place="guard",
                fix="use ZeRO stage 1, 2 or 3 as in accelerate_configs/, or turn the guard off.",
            )
        needed = (*_BOTH, *(_STAGE_3 if self._is_stage_3 else _STAGE_1_AND_2))
        missing = [name for name in needed if not hasattr(self._zero, name)]
        if missing:
            raise ConfigError(
                f"deepspeed {deepspeed.__version__} has changed inside ({', '.join(missing)} is gone), so its steps "
                "cannot be skipped.",
                place="guard",
                fix="use deepspeed 0.19.8, or turn the guard off.",
            )
        if not getattr(self._zero, "compute_grad_norm", True):
            raise ConfigError(
                "DeepSpeed is told to compute no gradient norm.",
                place="zero_optimization.compute_grad_norm",
                fix="remove it, or turn the guard off.",
            )

    @property
    def has_loss_scaler(self) -> bool:
        return self._zero.dtype == torch.float16

    def attach(self) -> None:
        super().attach()
        self.accelerator.deepspeed_engine_wrapped = _JudgedEngineWrapper(self)

    def detach(self) -> None:
        super().detach()
        self.accelerator.deepspeed_engine_wrapped = self._wrapper

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self.accelerator.sync_gradients = is_last
        # The forward pass needs it too: it prepares what the backward reduces.
        self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=self.accelerator.sync_gradients)
        self._engine.backward(loss, **{"scale_wrt_gas": False, **kwargs})

    def clip(self, max_grad_norm: float | None) -> float | None:
        """Return the norm; the engine clips to `max_grad_norm` when it steps."""
        self._zero.clip_grad = float(max_grad_norm or 0.0)
        return self.global_norm()

    def global_norm(self) -> float:
        """Norm of the global batch's gradients before the step; infinite if not all of them are finite."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        wait = getattr(self._zero, "_wait_for_offload_copies", None)
        if wait is not None:  # offloaded gradients may still be being copied to the host
            wait()
        if self._is_stage_3:
            norm = combine_grad_norm_groups(self._zero._get_norm_groups())
        else:
            norm = self._zero.scaled_global_norm()
        value = float(norm)
        return value / float(self._zero.loss_scale) if math.isfinite(value) and value >= 0 else math.inf

    def take(self, lr_factor: float = 1.0) -> None:
        with self._lowered_inside(lr_factor):
            self._engine.step()
        self._step()  # Accelerate's, which does nothing, but tells torch's schedulers that a step was taken

    def drop(self) -> None:
        with self._overflow_pretended():
            self._engine.step()
        # DeepSpeed's flat buffer is overwritten in the next backward, but only where that has gradients.
        buffer = getattr(self._zero, "grad_partitions_flat_buffer", None)
        if torch.is_tensor(buffer):
            buffer.zero_()

    def zero_grad(self) -> None:
        """Does nothing: the engine's step has freed the gradients."""

    @contextlib.contextmanager
    def _lowered_inside(self, factor: float) -> Iterator[None]:
        """Lower the learning rate for the optimizer only, not for the schedule that the engine steps after it."""
        if factor == 1.0:
            yield
            return
        original = self._zero.step

        def step(*args: Any, **kwargs: Any) -> Any:
            with lowered(self._zero.param_groups, factor):
                return original(*args, **kwargs)

        with _replaced(self._zero, "step", step):
            yield

    @contextlib.contextmanager
    def _overflow_pretended(self) -> Iterator[None]:
        """Make `step` find an overflow, without informing its loss scaler."""
        name = "_overflow_check_and_loss_scale_update" if self._is_stage_3 else "check_overflow"
        original = getattr(self._zero, name)

        def check(*args: object, **kwargs: object) -> bool:
            original(*args, **kwargs)  # it also resets the flags set by the backward pass
            self._zero.overflow = True
            return True

        def keep_scale(*unused: object, **unused_too: object) -> None:
            """The loss scale is not affected."""

        with contextlib.ExitStack() as changes:
            changes.enter_context(_replaced(self._zero, name, check))
            changes.enter_context(_replaced(self._zero, "_update_scale", keep_scale))
            if not self._is_stage_3:
                changes.enter_context(_replaced(self._zero, "check_grad_overflow", True))
            yield


class _JudgedEngineWrapper(DeepSpeedEngineWrapper):
    """Used by `accelerator.backward` and `accelerator.clip_grad_norm_`: Accelerate's wrapper without the step."""

    def __init__(self, gate: DeepSpeedGate) -> None:
        super().__init__(gate._engine)
        self._gate = gate

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: object) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)

    def get_global_grad_norm(self) -> float:
        return self._gate.global_norm()


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Temporarily replace an attribute of one object, whether it was set on the object or on its class."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
