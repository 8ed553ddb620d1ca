"""DeepSpeed's internals are as `deepspeed_gate` found them in 0.19.8; tests/distributed runs the gate itself."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from accel_scale.training.guard import deepspeed_control


def source_of(cls: type, name: str) -> str:
    """A method's source, even where a decorator hides it."""
    text = textwrap.dedent(inspect.getsource(cls))
    [found] = [node for node in ast.parse(text).body[0].body if getattr(node, "name", None) == name]
    return ast.get_source_segment(text, found)


def calls(cls: type, name: str) -> list[str]:
    """Names called on ``self``, in source order."""
    return re.findall(r"self\.([a-z_0-9]+)\(", source_of(cls, name))


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (DeepSpeedZeroOptimizer, deepspeed_control._STAGE_1_AND_2 + deepspeed_control._BOTH),
        (DeepSpeedZeroOptimizer_Stage3, deepspeed_control._STAGE_3 + deepspeed_control._BOTH),
    ],
)
def test_what_is_used_is_there(cls, names) -> None:
    source = inspect.getsource(cls)
    for name in names:
        assert hasattr(cls, name) or f"self.{name} =" in source, name


@pytest.mark.slow
def test_stage_1_and_2_drop_an_overflow_before_they_touch_weights() -> None:
    order = calls(DeepSpeedZeroOptimizer, "step")
    assert order.index("check_overflow") < order.index("scaled_global_norm") < order.index("_update_scale")
    assert order.index("_update_scale") < order.index("zero_grad") < order.index("_optimizer_step")
    source = source_of(DeepSpeedZeroOptimizer, "step")
    assert "if self.check_grad_overflow:\n            self.check_overflow(" in source
    assert "self._update_scale(self.overflow)" in source


@pytest.mark.slow
def test_stage_3_drops_an_overflow_before_it_touches_weights() -> None:
    order = calls(DeepSpeedZeroOptimizer_Stage3, "step")
    assert order.index("_overflow_check_and_loss_scale_update") < order.index("_get_norm_groups")
    assert order.index("_get_norm_groups") < order.index("_loss_scale_update_and_overflow_cleanup")
    assert order.index("_loss_scale_update_and_overflow_cleanup") < order.index("_optimizer_step")
    cleanup = source_of(DeepSpeedZeroOptimizer_Stage3, "_loss_scale_update_and_overflow_cleanup")
    assert "self._update_scale(self.overflow)" in cleanup
    assert "if self.overflow:" in cleanup


def test_the_engine_holds_its_schedule_back_after_an_overflow() -> None:
    source = source_of(DeepSpeedEngine, "_take_model_step")
    assert source.index("self.optimizer.step()") < source.index("self._step_applied = not overflow")
    assert source.index("if overflow:") < source.index("self.lr_scheduler.step(")


@pytest.mark.slow
def test_accelerate_steps_in_its_backward_and_asks_the_engine_for_the_norm() -> None:
    source = source_of(DeepSpeedEngineWrapper, "backward")
    assert source.index("self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)") < source.index(
        "self.engine.backward(loss, **kwargs)"
    )
    assert "self.engine.step()" in source
    assert "scale_wrt_gas=" in source_of(DeepSpeedEngine, "backward")


def test_a_norm_that_is_not_finite_is_never_taken_for_one() -> None:
    assert float(combine_grad_norm_groups([-1.0, 3.0])) == float("inf")


def test_a_trainers_backward_pass_takes_no_step() -> None:
    """Accelerate's wrapper steps at the accumulation boundary; the gate steps once the step has been judged."""
    calls: list[Any] = []
    engine = SimpleNamespace(
        set_gradient_accumulation_boundary=lambda is_boundary: calls.append(is_boundary),
        backward=lambda loss, **options: calls.append((loss, options)),
        step=lambda: calls.append("step"),
    )
    gate: Any = SimpleNamespace(_engine=engine, global_norm=lambda: 3.0)
    wrapper = deepspeed_control._JudgedEngineWrapper(gate)
    wrapper.backward(1.0, sync_gradients=False, retain_graph=True)  # type: ignore[arg-type]
    wrapper.backward(2.0)  # type: ignore[arg-type]
    assert calls == [False, (1.0, {"retain_graph": True}), True, (2.0, {})]
    assert wrapper.get_global_grad_norm() == 3.0
