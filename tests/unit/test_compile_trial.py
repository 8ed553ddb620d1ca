"""Long runs on a CPU try compiled layers, keep the faster variant, and stick to the decision after a resume."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.modeling.fused.own import fuse_own_layers
from accel_scale.pretraining.compile_trial import KEPT, LEFT, LONG_RUN_SECONDS, OPEN, TRIAL, CompileTrial

EAGER_STEPS, TRIAL_STEPS = 6, 10  # the first steps of each are not timed: they allocate, or compile


@pytest.fixture(autouse=True)
def _stance():
    yield
    torch.compiler.set_stance("default")


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, attn_implementation="sdpa"))


def told(trial: CompileTrial, seconds: float, steps: int, steps_left: int = 100_000) -> str:
    for _ in range(steps):
        trial.stepped(seconds, steps_left, taken=True)
    return trial.phase


def gradients(model: LlamaForCausalLM) -> list[torch.Tensor]:
    rows = torch.arange(24).reshape(2, 12)
    model.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_compiled_layers_are_kept_where_they_are_a_tenth_faster():
    model, said, state = tiny(), [], {}
    trial, eager = CompileTrial(model, said.append, can_try=True, state=state), gradients(model)
    assert told(trial, 1.0, EAGER_STEPS - 1) == OPEN
    assert told(trial, 1.0, 1) == TRIAL
    before = graphs()
    for one, other in zip(gradients(model), eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert graphs() > before  # it really was compiled
    going_on = dict(state)
    assert told(trial, 0.95, TRIAL_STEPS) == LEFT
    assert "1.05 x as fast" in said[-1]
    before = graphs()
    model(input_ids=torch.arange(26).reshape(2, 13))  # another sequence length
    assert graphs() == before
    assert told(CompileTrial(model, said.append, can_try=True, state=dict(state)), 9.0, 50) == LEFT  # decided once

    torch.compiler.set_stance("default")
    again = CompileTrial(model, said.append, can_try=True, state=going_on)  # a run that was stopped during the trial
    assert told(again, 0.5, TRIAL_STEPS) == KEPT
    assert "2.00 x as fast" in said[-1]
    assert told(CompileTrial(model, said.append, can_try=True, state=dict(going_on)), 9.0, 50) == KEPT


def test_fused_layers_are_the_models_own_while_they_are_compiled_and_fused_again_if_compiling_does_not_pay():
    model, state = tiny(), {}
    fuse_own_layers(model)
    norm = model.model.layers[0].input_layernorm
    trial = CompileTrial(model, lambda line: None, can_try=True, state=state)
    assert told(trial, 1.0, EAGER_STEPS) == TRIAL
    assert "forward" not in vars(norm)
    going_on = dict(state)
    assert told(trial, 0.95, TRIAL_STEPS) == LEFT
    assert "forward" in vars(norm)
    resumed = CompileTrial(model, lambda line: None, can_try=True, state=going_on)  # stopped during the trial
    assert "forward" not in vars(norm)
    assert told(resumed, 0.5, TRIAL_STEPS) == KEPT
    assert "forward" not in vars(norm)


def test_short_runs_and_choices_of_the_user_are_left_alone():
    for can_try, steps_left in ((True, int(LONG_RUN_SECONDS) - 1), (False, 100_000)):
        said: list[str] = []
        assert told(CompileTrial(tiny(), said.append, can_try=can_try, state={}), 1.0, 50, steps_left) == LEFT
        assert not said


def test_steps_that_were_not_taken_do_not_count():
    trial = CompileTrial(tiny(), print, can_try=True, state={})
    for _ in range(50):
        trial.stepped(1.0, 10, taken=False)
    assert trial.phase == OPEN
