"""The parts of the start check: a twin's weights, its rows, and which steps count as equal."""

from __future__ import annotations

import logging
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.modeling.packed_attention import PACKED_ATTENTION
from accel_scale.start_check.rows import tiny_batch
from accel_scale.start_check.steps import Difference, Step, difference, take_step, untrained_weights
from accel_scale.start_check.twin import (
    FIRST_PLAIN_TOKEN,
    VOCAB_SIZE,
    attach_adapter,
    stir,
    undisturbed,
    without_dropout,
)
from accel_scale.training.ddp.powersgd import CountedBytes, FactorShape

NAN = float("nan")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def tensors(**values: list[float] | None) -> dict[str, torch.Tensor | None]:
    return {name: None if value is None else torch.tensor(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("mine", "theirs", "weight", "gradient"),
    [
        (tensors(a=[3.0, 4.0]), tensors(a=[3.0, 4.0]), "none", 0.0),
        (tensors(a=[3.0, 4.0], b=[1.0]), tensors(a=[3.0, 4.0], b=[2.0]), "b", 0.5),
        (tensors(a=[3.0, 4.0], b=[1.0]), tensors(a=[0.0, 5.0], b=[2.0]), "a", 10**0.5 / 5),
        (tensors(a=[1.0], b=None), tensors(a=[1.0], b=[2.0]), "b", 1.0),
        (tensors(a=[1.0], b=[2.0]), tensors(a=[1.0], b=None), "b", 2.0 / 1e-5),
        (tensors(a=[1.0], b=None), tensors(a=[1.0], b=None), "none", 0.0),
        (tensors(a=[1.0], b=[0.9e-5]), tensors(a=[1.0], b=[0.0]), "none", 0.0),  # rounding
        (tensors(a=[1.0], b=[1.1e-5]), tensors(a=[1.0], b=[0.0]), "b", 1.1),
        (tensors(a=[0.0]), tensors(a=[0.0]), "none", 0.0),
    ],
)
def test_steps_are_as_far_apart_as_their_worst_gradient(mine, theirs, weight: str, gradient: float) -> None:
    found = difference(Step(1.0, mine), Step(2.0, theirs))
    assert (found.losses, found.weight) == ((1.0, 2.0), weight)
    assert found.gradient == pytest.approx(gradient, rel=1e-4)


def test_what_is_small_is_rounding_alone() -> None:
    from accel_scale.start_check.steps import GRADIENT_TOLERANCE, LOSS_TOLERANCE

    for loss, expected, gradient, small in (
        (1.0, 1.0, 0.0, True), (0.5 + 0.9 * LOSS_TOLERANCE, 0.5, 0.0, True),
        (0.5 + 1.1 * LOSS_TOLERANCE, 0.5, 0.0, False), (LOSS_TOLERANCE, 0.0, GRADIENT_TOLERANCE, True),
        (8.0 * (1 + 0.9 * LOSS_TOLERANCE), 8.0, 0.0, True), (8.0 * (1 - 1.1 * LOSS_TOLERANCE), 8.0, 0.0, False),
        (1.0, 1.0, GRADIENT_TOLERANCE, True), (1.0, 1.0, 1.1 * GRADIENT_TOLERANCE, False),
        (NAN, 1.0, 0.0, False), (1.0, NAN, 0.0, False), (1.0, 1.0, NAN, False),
    ):  # fmt: skip
        assert Difference((loss, expected), gradient, "w").is_small is small, (loss, expected, gradient)
    text = str(Difference((1.25, 2.0), 0.5, "layer.w"))
    assert text == "loss 1.2500 against 2.0000, gradients 50% apart (layer.w)"
    assert 0 < LOSS_TOLERANCE < 1e-2
    assert 0 < GRADIENT_TOLERANCE < 1e-1


def test_weights_that_no_gradient_reaches_are_named_but_not_idle_experts() -> None:
    step = Step(
        1.0,
        tensors(
            **{
                "a": [0.0, 1.0], "b": [0.0, 0.0], "c": None, "layers.0.experts.0.w1": [0.0],
                "layers.0.experts.1.w1": [1.0], "layers.0.experts.0.w2": [0.0], "layers.1.experts.0.w1": None,
                "layers.2.w1": [0.0],
            }
        ),
    )  # fmt: skip
    assert untrained_weights(step) == ["b", "c", "layers.0.experts.0.w2", "layers.1.experts.0.w1", "layers.2.w1"]


def test_a_step_leaves_no_gradient_and_draws_the_same_numbers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    model.eval()
    model[2].weight.grad = torch.ones_like(model[2].weight)

    def loss(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return module(inputs.pop("x")).sum()

    inputs = {"x": torch.ones(8, 2)}
    first, second = (take_step(model, inputs, loss) for _ in range(2))
    assert model.training
    assert "x" in inputs, "the step has its own dictionary"
    assert first.loss == second.loss
    assert set(first.gradients) == {"0.weight", "2.weight", "2.bias"}
    assert all(first.gradients[name].equal(second.gradients[name]) for name in first.gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["packed", "padded", "lanes", "stream"])
def test_rows_are_changed_in_the_second_half_of_one_document(kind: str) -> None:
    batch = tiny_batch(kind, PACKED_ATTENTION)
    ids, other = batch.inputs["input_ids"], batch.changed["input_ids"]
    changed = ids != other
    assert changed.sum() == {"packed": 4, "lanes": 4, "padded": 12, "stream": 12}[kind]
    assert not (changed & (batch.before | batch.others)).any()
    # Everything except padding and the document's second half is watched.
    mask = batch.inputs.get("attention_mask", torch.ones_like(ids)).bool()
    assert torch.equal(changed | batch.before | batch.others, mask)
    assert batch.before.sum() == changed.sum()
    assert not (batch.before & batch.others).any()
    assert ids[mask].min() >= FIRST_PLAIN_TOKEN
    assert other[mask].min() >= FIRST_PLAIN_TOKEN
    assert max(ids.max(), other.max()) < VOCAB_SIZE
    labels = batch.inputs["labels"]
    if kind in ("packed", "padded"):  # each row begins with a prompt without loss
        first = [0, 24] if kind == "packed" else [0]
        assert all((labels.flatten()[at : at + 8] == -100).all() for at in first)
        assert labels.flatten()[8] == ids.flatten()[8]
    if kind == "lanes":
        assert batch.inputs["position_ids"].tolist()[1] == [*range(13), *range(11)]
        assert torch.equal(labels == -100, batch.inputs["position_ids"] == 0)
    if kind == "stream":
        assert torch.equal(labels, ids)
        assert set(batch.inputs) == {"input_ids", "labels"}


def test_every_weight_of_a_twin_matters() -> None:
    config = LlamaConfig(**SIZES, vocab_size=64, attention_dropout=0.3)
    model = LlamaForCausalLM(config)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    stir(model, 3)
    again = LlamaForCausalLM(config)
    again.load_state_dict({**again.state_dict(), **start})
    stir(again, 3)
    for (name, weight), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert weight.equal(other), "of one seed"
        assert not weight.equal(start[name]), name
    assert model.lm_head.weight.std().item() == pytest.approx(8 / 32**0.5, rel=0.1)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(1, rel=0.1)
    assert model.model.norm.weight.std().item() == pytest.approx(0.1, rel=0.5)
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    without_dropout(model)
    assert config.attention_dropout == model.model.layers[0].self_attn.attention_dropout == 0.0
    adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=0.4, task_type="CAUSAL_LM")
    before = model.lm_head.weight.clone()
    tuned, other = attach_adapter(model, adapter), attach_adapter(LlamaForCausalLM(config), adapter, seed=1)
    assert adapter.lora_dropout == 0.4, "the run's own stays"
    assert model.lm_head.weight.equal(before), "only what is trained"
    layers = [m.base_model.model.model.layers[0].self_attn.q_proj for m in (tuned, other)]
    assert layers[0].lora_B["default"].weight.abs().max() > 0
    assert not layers[0].lora_B["default"].weight.equal(layers[1].lora_B["default"].weight)
    assert all(getattr(module, "p", 0.0) == 0.0 for module in tuned.modules())


def test_building_a_twin_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(2).tolist(), random.random()
    torch.manual_seed(7)
    random.seed(7)
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.NOTSET)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), undisturbed():
            assert torch.get_default_dtype() == torch.float32
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert logging.root.manager.disable == logging.ERROR
            warnings.warn("not shown", UserWarning, stacklevel=1)
            torch.rand(3), random.random()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert logging.root.manager.disable == logging.NOTSET
    assert (torch.rand(2).tolist(), random.random()) == expected


def test_bytes_are_counted_bucket_by_bucket_and_step_by_step() -> None:
    counted = CountedBytes()
    steps = []
    for step in ((5, 3), (7,), (1, 1, 1)):
        lasts = [False] * (len(step) - 1) + [True]
        for size, last in zip(step, lasts, strict=True):
            counted.count(SimpleNamespace(is_last=lambda last=last: last), size)
        steps.append((counted.step_bytes, counted.sent_bytes))
    assert steps == [(8, 8), (7, 15), (3, 18)]
    assert FactorShape(6, 4, 2).sent_values == 20
    assert FactorShape(6, 4, 0).sent_values == 24
